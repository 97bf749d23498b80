"""A strategy as the files that trainers take: graft.yaml, a DeepSpeed JSON, an accelerate YAML. Pure.

In: an answer. Out: text by file name. Does not write to disk.
"""

import json
import math
from typing import Any

from graftwork.records.plan import FitAnswer

GRAFT, DEEPSPEED, ACCELERATE = "graft.train.yaml", "ds_config.json", "accelerate.yaml"
CLIPPING = 1.0
BUCKET = 500_000_000
LEARNING_RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4, "dora": 2e-4}
"""Usual ones, to start from; not a finding of ours."""


def settings_files(answer: FitAnswer) -> dict[str, str]:
    """All that can be written for this strategy."""
    files = {
        DEEPSPEED: json.dumps(deepspeed_config(answer), indent=2) + "\n",
        ACCELERATE: _yaml(accelerate_config(answer), title=_title(answer)),
    }
    if answer.strategy.train:
        files[GRAFT] = _yaml(graft_sections(answer), title=_title(answer))
    return files


def graft_sections(answer: FitAnswer) -> dict[str, Any]:
    """The sections to add to graft.yaml."""
    sections: dict[str, Any] = {"train": dict(answer.strategy.train)}
    planned = answer.strategy.tuning or answer.strategy.streamed
    limit = planned.limit_gib if planned is not None else answer.question.memory_limit_gib
    if limit is not None:
        # Without one, the trainer takes 94 % of the card.
        sections["plan"] = {"memory_limit_gib": math.floor(100 * limit + 1e-6) / 100}
    return sections


def deepspeed_config(answer: FitAnswer) -> dict[str, Any]:
    """DeepSpeed's configuration. Stage 0 where nothing is cut up: then it does what DDP does."""
    strategy, question = answer.strategy, answer.question
    cards = cards_of(answer)
    stage = {"zero2": 2, "zero3": 3, "fsdp2": 3}.get(strategy.sharding, 0)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": BUCKET}
        if strategy.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3 and strategy.offload == "weights":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    micro, accumulation = strategy.micro_rows, strategy.accumulation
    config: dict[str, Any] = {
        "train_batch_size": micro * accumulation * cards,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": strategy.precision == "bfloat16"},
        "fp16": {"enabled": strategy.precision == "float16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if question.method == "full":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LEARNING_RATES["full"], "weight_decay": 0.0}}
    return config


def accelerate_config(answer: FitAnswer) -> dict[str, Any]:
    """What `accelerate launch --config_file` takes."""
    strategy, cards = answer.strategy, cards_of(answer)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}.get(
            strategy.sharding, "MULTI_GPU" if cards > 1 else "NO"
        ),
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[strategy.precision],
        "num_machines": 1,
        "num_processes": cards,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": answer.question.machine.gpu is None,
    }
    if strategy.sharding in ("zero2", "zero3"):
        # The rest is in DeepSpeed's own file; accelerate refuses settings that are in both.
        del config["mixed_precision"]
        config["deepspeed_config"] = {
            "deepspeed_config_file": DEEPSPEED,
            "zero3_init_flag": strategy.sharding == "zero3",
        }
    if strategy.sharding == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": strategy.offload == "weights",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": strategy.checkpointed_layers > 0,
        }
    return config


def cards_of(answer: FitAnswer) -> int:
    """Cards that the strategy uses."""
    return answer.question.machine.gpus if answer.strategy.sharding != "none" else 1


def _title(answer: FitAnswer) -> str:
    strategy = answer.strategy
    return (
        f"# {answer.verdict}\n"
        f"# {strategy.micro_rows} row(s) at a time × {strategy.accumulation} × {cards_of(answer)} card(s); "
        f"{answer.certainty} by `graft plan fit`\n"
    )


def _yaml(content: dict[str, Any], *, title: str) -> str:
    import yaml

    return title + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
