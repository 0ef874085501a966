"""`onehead compare`: multi-head against multi-query attention, counted in bytes and measured in
seconds.
"""
