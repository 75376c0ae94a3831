"""Training: data, optimizer, step, loop, checkpoints, report."""
