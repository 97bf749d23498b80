"""TRL's side of `rl_step.py`: GRPO with transformers' generation, in a process of its own.

In: a file with the work. Out: a line in `trl_steps.jsonl` for each step. TRL takes its rows from a stand-in
of `datasets`: a real one hashes its rows with dill, which fails where the packages of a machine do not fit
each other, and neither is part of a step.
"""

import importlib.machinery
import json
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

STEPS = "trl_steps.jsonl"
LEAST_STEPS = 3
"""The first does not count, and two that do are the fewest to report."""


class Rows:
    """As much of `datasets.Dataset` as TRL and transformers ask of rows in memory."""

    cache_files: tuple[str, ...] = ()
    features = None

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows[place]

    @property
    def column_names(self) -> list[str]:
        return list(self._rows[0])


def replace_datasets() -> None:
    """Make `import datasets` give the stand-in, whether or not the package is there."""
    module = ModuleType("datasets")
    module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    module.__version__ = "5.0.0"  # type: ignore[attr-defined]
    names = ("IterableDataset", "DatasetDict", "IterableDatasetDict")
    for name, kind in (("Dataset", Rows), *((name, type(name, (), {})) for name in names)):
        setattr(module, name, kind)
    sys.modules["datasets"] = module


def run_trl(work: dict[str, Any], folder: Path) -> None:
    replace_datasets()
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    begun = time.monotonic()
    card = work["device"] == "cuda"
    torch.set_num_threads(work["threads"])
    tokenizer = AutoTokenizer.from_pretrained(work["base"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = torch.bfloat16 if card else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work["base"], dtype=dtype).to(work["device"])
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows = Rows([{"prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines])
    lengths: list[float] = []

    def draw(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(float(sum(map(len, completion_ids))))
        return [random.random() for _ in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            memory = gpu_memory(torch) if card else {}
            line = {"at": time.time(), "tokens": lengths[-1], **memory}
            with (folder / STEPS).open("a") as file:
                file.write(json.dumps(line) + "\n")
            late = time.monotonic() - begun > work["limit"]
            control.should_training_stop |= late and state.global_step >= LEAST_STEPS

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=work["micro_rows"],
        gradient_accumulation_steps=work["prompts"] * work["answers"] // work["micro_rows"],
        num_generations=work["answers"],
        max_completion_length=work["max_tokens"],
        max_steps=work["steps"],
        learning_rate=1e-5,
        bf16=card,
        gradient_checkpointing=work["checkpointing"],
        use_cpu=not card,
        remove_unused_columns=False,
        logging_steps=work["steps"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **work["trl"],
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=draw,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Clock()],
    )
    trainer.train()


def gpu_memory(torch: Any) -> dict[str, float]:
    """What torch took from the card at most, and how much of it tensors used."""
    return {
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


if __name__ == "__main__":
    run_trl(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
