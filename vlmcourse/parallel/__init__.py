"""Parallelism applied to a plain model from outside: ranks, strategies, and the checks that each strategy is real."""
