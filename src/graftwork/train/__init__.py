"""Plan and dataset in, adapter out: the step, the loop, checkpoints, resume."""
