"""The training loop and its parts: loss, accumulation, optimizer, precision, seeds, checkpoints, evaluation."""
