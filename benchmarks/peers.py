"""One peer at one setting, in a process of its own: `python peers.py NAME FOLDER SHAPE CAP_GIB`.

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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from train_gpu_model import SHAPES

PREFIX = "PEER "
DENSE_BF16 = 790e12
"""What a large bf16 product reaches on an H200 with random data, measured on the same machine."""
SEQUENCE, RANK, ALPHA = 2048, 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_STEPS, TIMED_STEPS = 4, 8


@dataclass(frozen=True)
class Variant:
    """One peer at one setting. `checkpointed`: the peer's own activation checkpointing, all layers."""

    peer: Literal["unsloth", "hf", "trl"]
    rows: int
    nf4: bool = False
    checkpointed: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        parts = [self.peer, "liger" if self.liger else "", "qlora" if self.nf4 else "lora"]
        parts += ["gc" if self.checkpointed else "none", f"mb{self.rows}"]
        return "-".join(part for part in parts if part)


_ORDERED = (
    Variant("unsloth", 4, nf4=True, checkpointed=True),
    Variant("unsloth", 1, nf4=True),
    Variant("unsloth", 2, nf4=True),
    Variant("unsloth", 4),
    Variant("unsloth", 2),
    Variant("unsloth", 1),
    Variant("unsloth", 4, checkpointed=True),
    Variant("unsloth", 1, nf4=True, checkpointed=True),
    Variant("hf", 4, liger=True),
    Variant("hf", 4, liger=True, nf4=True, checkpointed=True),
    Variant("trl", 4, liger=True, checkpointed=True),
    Variant("trl", 4, checkpointed=True),
    Variant("hf", 4, liger=True, checkpointed=True),
    Variant("hf", 4, checkpointed=True),
    Variant("trl", 4, liger=True),
    Variant("hf", 1, liger=True),
    Variant("hf", 1),
    Variant("hf", 1, liger=True, nf4=True),
    # Not in the published tables: does a larger micro-batch help the peers where memory allows it?
    Variant("unsloth", 8),
    Variant("unsloth", 4, nf4=True),
    Variant("unsloth", 8, nf4=True, checkpointed=True),
    Variant("unsloth", 16),
)
VARIANTS = {variant.name: variant for variant in _ORDERED}


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


def import_peer(variant: Variant) -> None:
    """All that takes long and needs no weights. Unsloth and Liger change what is imported after them."""
    if variant.peer == "unsloth":
        import unsloth  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    if variant.nf4:
        import bitsandbytes  # noqa: F401
    if variant.liger:
        import liger_kernel.transformers  # noqa: F401
    if variant.peer == "trl":
        from trl import SFTTrainer  # noqa: F401


def load_peer(variant: Variant, folder: Path) -> Any:
    return _load_unsloth(variant, folder) if variant.peer == "unsloth" else _load_peft(variant, folder)


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )


def _load_unsloth(variant: Variant, folder: Path) -> Any:
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=SEQUENCE,
        dtype=torch.bfloat16,
        load_in_4bit=variant.nf4,
        local_files_only=True,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(TARGETS),
        use_gradient_checkpointing="unsloth" if variant.checkpointed else False,
    )


def _load_peft(variant: Variant, folder: Path) -> Any:
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    maker: Any = AutoModelForCausalLM
    if variant.liger:
        from liger_kernel.transformers import AutoLigerKernelForCausalLM

        maker = AutoLigerKernelForCausalLM
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = maker.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
        quantization_config=four_bit if variant.nf4 else None,
        attn_implementation="sdpa",
    )
    model.config.use_cache = False
    if variant.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return get_peft_model(model, lora_config())


if __name__ == "__main__":
    main()
