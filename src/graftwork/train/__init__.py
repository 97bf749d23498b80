"""Training: a plan and a dataset in, an adapter out.

`worker.py` is the process; `loop.py` the steps, checkpoints and resume; `engine.py` what an engine is, with
faster steps in `cpu/` and `gpu/`; `objectives/` what is optimized (add one there); `callbacks/` what watches
a run; `checkpoints/`, `distributed/` and `trackers.py` what their names say.
"""
