"""The peers of `train_full.py` at the same shape and cap, and our strategies in a group on one device.

`fsdp2`: torch's own, float32 weights on the host (pinned), bfloat16 on the card, activation checkpointing,
fused AdamW on the host with all threads. `deepspeed`: ZeRO-3 with weights and optimizer on the host.
`distributed`: `graft`'s strategies against one process. Started by `train_full.py`.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from train_full import RATE, Case, card_gib, device, emit, host_gib, say, timed_steps
from train_full_model import make_model, make_rows, step_sizes

MICRO_ROWS = 4
STRATEGIES = ("fsdp", "zero2", "zero3")


def join_group() -> None:
    """A group of one process."""
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend)


def limit_card(case: Case) -> None:
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(case.cap_gib / total, 1.0))


def batches(case: Case, micro_rows: int) -> list[Any]:
    import torch

    count, length = step_sizes(case.shape)
    rows = make_rows(case.shape, count, length=length)
    tokens = torch.tensor([row.tokens for row in rows])
    return list(tokens.split(min(micro_rows, count)))


def loss_of(model: Any, tokens: Any) -> Any:
    tokens = tokens.to(device())
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def figures(case: Case, seconds: list[float], micro_rows: int) -> dict[str, Any]:
    count, length = step_sizes(case.shape)
    middle = sorted(seconds)[len(seconds) // 2]
    return {
        "tokens_per_second": round(count * length / middle, 1),
        "step_seconds": round(middle, 3),
        **card_gib(),
        "host_gib": round(host_gib(), 1),
        "micro_rows": micro_rows,
    }


def run_fsdp2(case: Case) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    begun = time.perf_counter()
    join_group()
    limit_card(case)
    pin_by_threads(case)
    card, rows = torch.cuda.is_available(), case.options.get("micro_rows", MICRO_ROWS)
    pinned = case.options.get("pinned", True)
    model = make_model(case.shape).requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    say(case, f"model made in {time.perf_counter() - begun:.0f} s; {torch.get_num_threads()} threads")
    half = torch.bfloat16 if card else torch.float32
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if card else OffloadPolicy(),
    }
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    portions = batches(case, rows)
    emit({"setup_seconds": round(time.perf_counter() - begun, 1), "micro_rows": rows, "pinned": pinned})
    say(case, f"sharded; host {host_gib():.1f} GiB")

    def step() -> float:
        times = [time.perf_counter()]
        total = 0.0
        for tokens in portions:
            loss = loss_of(model, tokens) / len(portions)
            loss.backward()
            total += float(loss.detach())
        times.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        names = ("passes_seconds", "clipping_seconds", "adam_seconds")
        spans = (after - before for before, after in itertools.pairwise(times))
        emit({name: round(seconds, 2) for name, seconds in zip(names, spans, strict=True)})
        return total

    seconds = timed_steps(case, step, most=3, least=2, seconds=30)
    found = figures(case, seconds, rows)
    torch.distributed.destroy_process_group()
    return found


def pin_by_threads(case: Case) -> None:
    """Lock pages by several threads where this torch can: with one, gigabytes take many seconds."""
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.memory._set_allocator_settings(
            "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        )
    except Exception as error:
        say(case, f"pages are locked by one thread: {str(error).splitlines()[0]}")


def run_deepspeed(case: Case) -> dict[str, Any]:
    try:
        import deepspeed
    except ImportError:
        return {"skipped": "deepspeed is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "there is no card"}
    begun = time.perf_counter()
    join_group()
    limit_card(case)
    model = make_model(case.shape, torch.bfloat16).requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    portions = batches(case, MICRO_ROWS)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_ROWS,
        "gradient_accumulation_steps": len(portions),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    adam = "DeepSpeedCPUAdam"
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(model.parameters(), lr=RATE, weight_decay=0.0)
    except Exception as error:  # no compiler, or an operator that does not build
        say(case, f"DeepSpeed's CPU Adam cannot be built: {str(error).splitlines()[0]}")
        adam = "torch AdamW, fused"
        config["zero_force_ds_cpu_optimizer"] = False
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    emit({"setup_seconds": round(time.perf_counter() - begun, 1), "adam": adam})
    say(case, f"set up with {adam}; host {host_gib():.1f} GiB")

    def step() -> float:
        total = 0.0
        for tokens in portions:
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(portions)
        return total

    found = figures(case, timed_steps(case, step, most=3, least=2, seconds=30), MICRO_ROWS)
    return {**found, "adam": adam}


def run_distributed(case: Case) -> dict[str, Any]:
    """Losses of every strategy in a group of processes on this device against those of one process."""
    processes = case.options["processes"]
    command = ["graftwork.train.distributed.torchrun", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(Path(__file__)), "--member", json.dumps(vars(case))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "GRAFT_SHARE_CARD": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"ended with {done.returncode}"}


def run_member(case: Case) -> dict[str, Any] | None:
    """One process of the group."""
    from importlib.util import find_spec

    from graftwork.train.distributed.strategies import SingleProcess

    rank = int(os.environ["RANK"])
    reference = train_few(case, SingleProcess())
    found: dict[str, Any] = {"one process": reference}
    last = None
    for strategy in STRATEGIES if find_spec("deepspeed") else STRATEGIES[:1]:
        for offload in (False, True):
            name = f"{strategy}{', offload' if offload else ''}"
            try:
                last = meet(strategy, offload=offload)
                losses = train_few(case, last, strategy=strategy)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                say(case, f"{name}: {found[name]}")
                continue
            off = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
            found[name] = {"losses": losses, "off": off, "backend": backend_name()}
            say(case, f"{name}: off by {off:.1e}")
    return found if rank == 0 else None


def backend_name() -> str:
    import torch

    return str(torch.distributed.get_backend())


def meet(strategy: str, *, offload: bool) -> Any:
    """A strategy as in a fresh process: accelerate remembers the last one."""
    from accelerate.state import AcceleratorState

    from graftwork.train.distributed.launch import make_strategy
    from graftwork.train.settings import TrainSettings

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    processes = int(os.environ["WORLD_SIZE"])
    settings = TrainSettings(strategy=strategy, processes=processes, offload=offload, method="full")
    return make_strategy(settings, device=device(), dtype="float32")


def train_few(case: Case, processes: Any, strategy: str = "single") -> list[float]:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.trainable import make_trainable
    from graftwork.train.engine import StepOptions, TrainingEngine
    from graftwork.train.settings import TrainSettings

    model = make_model(case.shape)
    if strategy not in ("fsdp", "zero3"):
        model = model.to(device())
    shape = AdapterShape(kind="full", rank=1, alpha=1, targets=(), layers=(0, 1))
    settings = TrainSettings(method="full", strategy=strategy, max_gradient_norm=0.5)
    engine = TrainingEngine(
        model,
        make_trainable(model, shape, seed=1),
        settings=settings,
        strategy=processes,
        step=StepOptions(micro_rows=2),
    )
    rows, length = step_sizes(case.shape)
    losses = []
    for _ in range(3):
        losses.append(engine.backward(make_rows(case.shape, rows, length=length)).loss)
        engine.apply(1e-3)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--member")
    asked = parser.parse_args()
    if not asked.case and not asked.member:
        print("passed over: `train_full.py` starts it")
        return
    case = Case(**json.loads(asked.case or asked.member))
    if asked.member:
        found = run_member(case)
    else:
        kinds = {"fsdp2": run_fsdp2, "deepspeed": run_deepspeed, "distributed": run_distributed}
        found = kinds[case.kind](case)
    if found is not None:
        emit(found)


if __name__ == "__main__":
    main()
