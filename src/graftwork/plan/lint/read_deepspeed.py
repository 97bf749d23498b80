"""DeepSpeed's JSON. `auto` stands for what the trainer fills in and is not known here."""

from graftwork.plan.lint.facts import Configuration
from graftwork.plan.lint.read_stated import STATED
from graftwork.plan.lint.reading import (
    Names,
    configure,
    gather,
    move,
    number,
    positive,
    settle_halves,
    text,
    whole,
    yes,
)
from graftwork.plan.lint.written import WrittenConfig

DEEPSPEED_FIELDS = {
    **{name: names for name, names in STATED.items() if name != "stated_batch"},
    "batch": Names(("train_batch_size",), positive),
    "micro_batch": Names(("train_micro_batch_size_per_gpu",), positive),
    "accumulation": Names(("gradient_accumulation_steps",), positive),
    "bf16": Names(("bf16.enabled", "bfloat16.enabled"), yes),
    "fp16": Names(("fp16.enabled",), yes),
    "zero_stage": Names(("zero_optimization.stage",), whole),
    "offload_optimizer": Names(("offload_optimizer.device",), text),
    "offload_weights": Names(("offload_param.device",), text),
    "cpu_offload": Names(("zero_optimization.cpu_offload",), yes),
    "optimizer": Names(("optimizer.type",), text),
    "learning_rate": Names(("optimizer.params.lr", "scheduler.params.warmup_max_lr"), number),
    "warmup_steps": Names(("scheduler.params.warmup_num_steps",), positive),
    "max_steps": Names(("scheduler.params.total_num_steps",), positive),
    "model": Names(("model", "model_name_or_path"), text),
    "epochs": Names(("num_train_epochs", "epochs"), number),
    "method_name": Names(("method",), text),
}


def read_deepspeed(written: WrittenConfig) -> Configuration:
    found = gather(written, DEEPSPEED_FIELDS)
    values = found.values
    settle_halves(found)
    for field in ("offload_optimizer", "offload_weights"):
        values[field] = values.get(field) in ("cpu", "nvme")
    if values.pop("cpu_offload", None):
        move(found, "cpu_offload", "offload_optimizer", True)
    name = values.pop("method_name", None)
    if name in ("lora", "qlora", "dora", "full"):
        move(found, "method_name", "method", name)
    return configure(written, "deepspeed", found)
