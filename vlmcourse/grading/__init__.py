"""Grading: what a test cell calls, the cases it is graded on, and one submission's grading in isolation.

Enters: a learner's function inside a notebook, or a whole submitted notebook. Leaves: points, and feedback that names
the misconception. nbgrader does the bookkeeping; `steps.py` closes the holes that it leaves. A submission is run with
the rights of whoever grades it: isolation here protects marks and other submissions, not the machine.
"""
