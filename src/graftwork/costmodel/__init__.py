"""What a training step costs: shapes -> tensors -> allocator -> memory, FLOPs, bytes -> time. No torch.

Imported by the planner, the engines and the pipeline. `model/shape.py` and `model/families.py` give the
shapes. There is one memory model for each kind of step:

- graft's own step on a GPU: `gpu_memory.gpu_peak`. It replays `gpu_step.py` (load, passes, update), which
  walks `gpu_tensors.py`, through `allocator.py`.
- transformers + PEFT: `plain_step.plain_peak`. It replays `plain_decoder.py`; `plain_step.peak_of_each`
  shares it among several GPUs.
- a family without a step recipe: `trace.py` follows the step itself on the `meta` device (needs torch).
- a CPU: `cpu_step.training_memory`.

Time: `rates.py` (what a GPU reaches), `gpu_time.py` (graft's own step), `plain_step.py` (transformers and
PEFT, links and offloading), `run.py` (a run around its steps: rows to passes, the start), `probed_rates.py`
(of a probe), `cpu_step.py`. `gpu_tuning.py` chooses how the own step spends a GPU's memory.
"""
