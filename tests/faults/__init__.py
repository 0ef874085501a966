"""Real servers, real faults: what each of F01-F28 does to the requests in flight. `scripts/faults`
runs them.
"""
