"""What a run costs: bytes by owner, tokens a second, and the log files that keep them."""
