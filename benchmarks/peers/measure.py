"""One peer at one setting, in a process of its own: `python -m peers.measure NAME FOLDER SHAPE CAP_GIB`.

It says `ready` when all is imported, `loaded` when the model stands and is adapted, and `done` with the
figures; after each of the first two it waits for a line on standard input. So the next peer can be
imported while this one loads, and nothing else runs while steps are timed.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers.load import import_peer, load_peer, lora_config
from peers.variants import SEQUENCE, TIMED_STEPS, VARIANTS, WARM_STEPS, Variant
from train_gpu_model import SHAPES

PREFIX = "PEER "
DENSE_BF16 = 790e12
"""What a large bf16 product reaches on an H200 with random data, measured on the same machine."""


def say(state: str, **values: object) -> None:
    print(PREFIX + json.dumps({"state": state, **values}), flush=True)


def main() -> None:
    variant, folder, shape = VARIANTS[sys.argv[1]], Path(sys.argv[2]), sys.argv[3]
    cap_gib = float(sys.argv[4])
    import_peer(variant)
    say("ready")
    sys.stdin.readline()
    limit_memory(cap_gib)
    begun = time.perf_counter()
    prepare = _prepare_trainer if variant.peer == "trl" else _prepare_loop
    run = prepare(variant, folder, SHAPES[shape].vocabulary)
    load_seconds = time.perf_counter() - begun
    say("loaded")
    sys.stdin.readline()
    forget_the_loading()
    seconds, loss = run()
    step = statistics.median(seconds[WARM_STEPS:])
    rate = variant.rows * SEQUENCE / step
    say(
        "done",
        tokens_per_second=round(rate),
        step_seconds=round(step, 4),
        spread=round((max(seconds[WARM_STEPS:]) - min(seconds[WARM_STEPS:])) / step, 3),
        mfu=round(SHAPES[shape].step_flops(SEQUENCE) * rate / DENSE_BF16, 3),
        load_seconds=round(load_seconds, 1),
        warm_seconds=round(sum(seconds[:WARM_STEPS]), 1),
        loss=round(loss, 3),
        **peak_memory(),
    )


def limit_memory(cap_gib: float) -> None:
    """A smaller card: the allocator gives back what it holds in reserve before it goes over the cap."""
    import torch

    if cap_gib and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / whole))


def forget_the_loading() -> None:
    """The peak of a step, not of what the loader needed on its way."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {"peak_allocated_gib": 0.0, "peak_reserved_gib": 0.0}
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def _prepare_loop(variant: Variant, folder: Path, vocabulary: int) -> Callable[[], tuple[list[float], float]]:
    """A bare step around the peer's model: forward, backward, fused AdamW at every micro-batch."""
    import torch

    model = load_peer(variant, folder)
    model.train()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def run() -> tuple[list[float], float]:
        torch.manual_seed(0)
        seconds: list[float] = []
        loss = torch.zeros(())
        for _ in range(WARM_STEPS + TIMED_STEPS):
            tokens = torch.randint(0, min(vocabulary, 150_000), (variant.rows, SEQUENCE), device=device)
            synchronize()
            begun = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize()
            seconds.append(time.perf_counter() - begun)
        return seconds, float(loss)

    return run


def _prepare_trainer(
    variant: Variant, folder: Path, vocabulary: int
) -> Callable[[], tuple[list[float], float]]:
    """TRL's own loop on rows of exactly the sequence's length: nothing to pad, nothing to pack."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        """From the end of one optimizer step to the end of the next: the trainer's own work is in it."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())

    steps = WARM_STEPS + TIMED_STEPS
    torch.manual_seed(0)
    tokens = torch.randint(0, min(vocabulary, 150_000), (steps * variant.rows, SEQUENCE))
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=variant.rows,
        gradient_accumulation_steps=1,
        max_length=SEQUENCE,
        packing=False,
        gradient_checkpointing=variant.checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=variant.liger,
        bf16=True,
        optim="adamw_torch_fused",
        max_grad_norm=0.0,  # the bare steps of the others do not clip
        learning_rate=1e-4,
        logging_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa", "use_cache": False},
    )
    trainer = SFTTrainer(
        model=str(folder),
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora_config(),
        callbacks=[Clock()],
    )

    def run() -> tuple[list[float], float]:
        loss = trainer.train().training_loss
        return [after - before for before, after in pairwise(ends)], float(loss)

    return run


if __name__ == "__main__":
    main()
