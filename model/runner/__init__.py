"""ModelRunner: a decoder, its KV cache and a device, which compute the steps that a scheduler
plans.
"""
