"""Training: a plan and a dataset in, an adapter out.

`worker.py` is the process; `loop.py` the steps, checkpoints and resume; `engine.py` what an engine is, with
faster steps in `cpu/`, `gpu/` and `streamed/`; `objectives/` what is optimized (add one there), `rollouts/`
the answers it learns from; `sweep.py`, `federated.py` and `all_models.py` are many runs as one.
"""
