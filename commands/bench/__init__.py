"""`onehead bench`: load on a running server over HTTP, or on an engine in this process, with rates
and latencies reported.
"""
