"""Subcommands of `vlmcourse`, one module each; `cli.py` lists them."""
