"""The training loop: one step, evaluation, and the run around them."""
