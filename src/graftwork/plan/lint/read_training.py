"""Configurations that end in Hugging Face's TrainingArguments and a LoraConfig, flat or in sections.

In: YAML or JSON with keys by these names, at any depth. Out: a Configuration. What TrainingArguments
takes where nothing is said is filled in only where a rule depends on it: an evaluation that nobody asked
for does not happen.
"""

from graftwork.plan.lint.facts import Configuration
from graftwork.plan.lint.read_stated import STATED
from graftwork.plan.lint.reading import (
    FoundValue,
    Names,
    configure,
    dtype,
    gather,
    move,
    names_list,
    number,
    positive,
    settle_halves,
    text,
    when,
    whole,
    yes,
)
from graftwork.plan.lint.written import WrittenConfig

TRAINING_FIELDS = {
    "model": Names(
        ("model_name_or_path", "base_model", "model_name", "model.name", "model.base", "model.id"), text
    ),
    "rank": Names(("lora_r", "lora_rank", "lora.r", "lora.rank", "adapter.r", "adapter.rank", "r"), positive),
    "alpha": Names(("lora_alpha", "lora.alpha", "adapter.alpha"), number),
    "stabilised": Names(("use_rslora",), yes),
    "targets": Names(("target_modules", "lora_target_modules", "lora_target"), names_list),
    "learning_rate": Names(("learning_rate", "lr"), number),
    "optimizer": Names(("optim", "optimizer"), text),
    "epochs": Names(("num_train_epochs", "num_epochs", "epochs"), number),
    "max_steps": Names(("max_steps",), positive),
    "micro_batch": Names(("per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"), positive),
    "accumulation": Names(("gradient_accumulation_steps", "gradient_accumulation"), positive),
    "warmup_steps": Names(("warmup_steps",), number),
    "warmup_share": Names(("warmup_ratio",), number),
    "save_when": Names(("save_strategy",), when),
    "save_steps": Names(("save_steps",), number),
    "eval_when": Names(("eval_strategy", "evaluation_strategy"), when),
    "eval_steps": Names(("eval_steps",), number),
    "keep_best": Names(("load_best_model_at_end",), yes),
    "best_metric": Names(("metric_for_best_model",), text),
    "patience": Names(("early_stopping_patience", "early_stopping"), whole),
    "max_length": Names(("max_seq_length", "max_seq_len", "max_length", "model_max_length"), positive),
    "packing": Names(("packing",), yes),
    "document_masks": Names(("document_masks", "padding_free", "packing_document_masks"), yes),
    "packing_strategy": Names(("packing_strategy",), text),
    "bf16": Names(("bf16",), yes),
    "fp16": Names(("fp16",), yes),
    "precision": Names(("mixed_precision", "precision"), dtype),
    "weights_dtype": Names(("torch_dtype", "model_dtype", "dtype"), dtype),
    "four": Names(("load_in_4bit",), yes),
    "eight": Names(("load_in_8bit",), yes),
    "compute_dtype": Names(("bnb_4bit_compute_dtype", "compute_dtype"), dtype),
    "flash_attention": Names(("use_flash_attention", "use_flash_attention_2", "flash_attention"), yes),
    "attention": Names(("attn_implementation",), text),
    "tf32": Names(("tf32",), yes),
    "recompute": Names(("gradient_checkpointing",), yes),
    "method_name": Names(("method", "adapter.method", "adapter.type", "finetuning_type"), text),
    **STATED,
}


def read_training(written: WrittenConfig) -> Configuration:
    found = gather(written, TRAINING_FIELDS)
    settle(found)
    return configure(written, "training", found)


def settle(found: FoundValue) -> None:
    """Names that say the same thing in different ways become one field."""
    _settle_precision(found)
    _settle_schedule(found)
    values = found.values
    if values.pop("attention", None) == "flash_attention_2":
        values.setdefault("flash_attention", True)
        found.places.setdefault("flash_attention", found.places["attention"])
    strategy = values.pop("packing_strategy", None)
    if strategy in ("bfd", "bfd_split", "bfd-requeue") and values.get("flash_attention"):
        # TRL's best-fit packing keeps rows apart by their positions, which only flash attention obeys.
        values.setdefault("document_masks", True)
    patience = values.pop("patience", None)
    if patience:
        values["stops_early"] = True
        found.places["stops_early"] = found.places["patience"]
    _settle_method(found)


def _settle_precision(found: FoundValue) -> None:
    settle_halves(found)
    for field, bits in (("four", 4), ("eight", 8)):
        if found.values.pop(field, None):
            move(found, field, "bits", bits)


def _settle_schedule(found: FoundValue) -> None:
    values = found.values
    warmup = values.get("warmup_steps")
    if warmup is not None:
        # Below one it is a share to transformers 5 as well.
        if 0 < warmup < 1:
            move(found, "warmup_steps", "warmup_share", warmup)
        else:
            values["warmup_steps"] = int(warmup)
    for field in ("save_steps", "eval_steps"):
        if field in values:
            # Intervals below one are shares of the run to transformers; there the rules have nothing to find.
            steps = values.pop(field)
            if steps >= 1:
                values[field] = int(steps)


def _settle_method(found: FoundValue) -> None:
    values = found.values
    name = str(values.pop("method_name", "")).lower()
    if name in ("lora", "qlora", "dora", "full", "sft_full"):
        values["method"] = "full" if name == "sft_full" else name
        found.places["method"] = found.places["method_name"]
    elif "rank" in values:
        values["method"] = "lora"
        found.places["method"] = found.places["rank"]
    if values.get("method", "lora") == "lora" and values.get("bits") == 4:
        values["method"] = "qlora"
        found.places["method"] = found.places["bits"]
