"""The `onehead` command and its subcommands other than `serve`. May import every package; nothing
imports it.
"""
