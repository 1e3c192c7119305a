"""Adaptive training: monitor, decide, act. A simulated cluster, its controllers, and what they may do.

Enters: a function `observe(metrics) -> actions`. Leaves: what a run under it trained, and what it lost. Everything here
is arithmetic without torch; `train/controlled.py` lets the same function steer a real run. Chapter 7, exercise 4.7.
"""
