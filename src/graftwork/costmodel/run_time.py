"""Seconds of a run besides its steps: starting, loading, recording, checkpoints. Pure."""

START_SECONDS = {"cpu": 10.0, "cuda": 20.0}
"""From the start of a run to its first step: interpreter, libraries, weights, and on a card its kernels
(measured on small bases: 11 s on two cores)."""
