"""Faults that a lab plants in a run on purpose, one small file each: what a run looks like when one thing is wrong.

Enters: a `Trainer` before `fit`, or a dataset. Leaves: the same, slower in a known way, for as long as a context is
open. Numbers of the training do not change. `catalog.py` names them all, with the cause that `monitor.diagnosis` should
find; `planted.py` makes a short run with one of them. Nothing here is used by training. Chapter 6.
"""
