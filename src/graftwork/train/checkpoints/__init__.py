"""Checkpoints: written whole, verified before they count, kept by policy, mirrored elsewhere."""
