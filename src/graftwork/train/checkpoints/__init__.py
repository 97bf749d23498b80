"""Checkpoints: the format on disk, the store that writes them during training, and their mirror."""
