"""Ranks in a notebook: `%%torchrun` runs a cell on several processes, shows what they print, and leaves none behind.

From the outside in: `magic` reads the cell and its flags, `launcher` starts the ranks and watches them, `guard` stands
beside each rank so that it cannot outlive the notebook, and `worker` is what a rank runs. This side of the package
imports no torch; only the ranks do.
"""
