"""What our settings are called in transformers, PEFT and TRL, in Axolotl and in LLaMA-Factory.

A key of theirs in graft.yaml is answered with ours, and docs/settings.md shows the table.
"""

from typing import NamedTuple


class OtherNames(NamedTuple):
    """The names of one setting elsewhere; several are separated by spaces, none is empty."""

    trl: str = ""
    axolotl: str = ""
    llama_factory: str = ""


_BATCH = "per_device_train_batch_size gradient_accumulation_steps"

OTHER_NAMES: dict[str, OtherNames] = {
    "base": OtherNames("model_name_or_path", "base_model", "model_name_or_path"),
    "data.logs": OtherNames("dataset_name", "datasets", "dataset"),
    "data.max_tokens": OtherNames("max_length", "sequence_len", "cutoff_len"),
    "data.validation": OtherNames("", "val_set_size", "val_size"),
    "train.method": OtherNames("", "adapter", "finetuning_type"),
    "train.method: qlora": OtherNames("load_in_4bit", "load_in_4bit", "quantization_bit"),
    "train.rank": OtherNames("r lora_r", "lora_r", "lora_rank"),
    "train.alpha": OtherNames("lora_alpha", "lora_alpha", "lora_alpha"),
    "train.use_rslora": OtherNames("use_rslora", "peft_use_rslora", "use_rslora"),
    "train.target_modules": OtherNames(
        "target_modules lora_target_modules", "lora_target_modules lora_target_linear", "lora_target"
    ),
    "train.upper_layers": OtherNames("layers_to_transform", "peft_layers_to_transform", ""),
    "train.start_from": OtherNames("", "lora_model_dir", "adapter_name_or_path"),
    "train.precision": OtherNames("bf16 fp16", "bf16 fp16", "bf16 fp16"),
    "train.compile": OtherNames("torch_compile", "torch_compile", ""),
    "train.packing": OtherNames("packing", "sample_packing", "packing neat_packing"),
    "train.gradient_checkpointing": OtherNames(
        "gradient_checkpointing", "gradient_checkpointing", "disable_gradient_checkpointing"
    ),
    "train.deterministic": OtherNames("full_determinism", "", ""),
    "train.epochs": OtherNames("num_train_epochs", "num_epochs", "num_train_epochs"),
    "train.batch_size": OtherNames(_BATCH, "micro_batch_size gradient_accumulation_steps", _BATCH),
    "train.learning_rate": OtherNames("learning_rate", "learning_rate", "learning_rate"),
    "train.warmup_ratio": OtherNames("warmup_ratio", "warmup_ratio", "warmup_ratio"),
    "train.weight_decay": OtherNames("weight_decay", "weight_decay", "weight_decay"),
    "train.max_grad_norm": OtherNames("max_grad_norm", "max_grad_norm", "max_grad_norm"),
    "train.max_rows": OtherNames("", "", "max_samples"),
    "train.checkpoint_every": OtherNames("save_steps", "save_steps", "save_steps"),
    "train.keep_checkpoints": OtherNames("save_total_limit", "save_total_limit", "save_total_limit"),
    "train.eval.every": OtherNames("eval_steps", "eval_steps", "eval_steps"),
    "train.eval.metric": OtherNames(
        "metric_for_best_model", "metric_for_best_model", "metric_for_best_model"
    ),
    "train.eval.early_stopping": OtherNames("early_stopping_patience", "early_stopping_patience", ""),
    "train.eval.keep_best": OtherNames(
        "load_best_model_at_end", "load_best_model_at_end", "load_best_model_at_end"
    ),
    "train.seed": OtherNames("seed", "seed", "seed"),
    "train.strategy": OtherNames("fsdp deepspeed", "fsdp deepspeed", "fsdp deepspeed"),
    "train.objective": OtherNames("", "rl", "stage"),
    "train.preferences.beta": OtherNames("beta", "rl_beta", "pref_beta"),
    "train.preferences.sft": OtherNames("rpo_alpha", "rpo_alpha", "pref_ftx"),
    "train.preferences.undesirable_weight": OtherNames(
        "undesirable_weight", "kto_undesirable_weight", "kto_rejected_weight"
    ),
    "train.policy.loss": OtherNames("loss_type importance_sampling_level", "", ""),
    "train.policy.scale_rewards": OtherNames("scale_rewards", "scale_rewards", ""),
    "train.policy.epsilon_low": OtherNames("epsilon", "epsilon", ""),
    "train.policy.epsilon_high": OtherNames("epsilon_high", "epsilon_high", ""),
    "train.policy.kl": OtherNames("beta", "beta", ""),
    "train.rewards": OtherNames("reward_funcs", "reward_funcs", ""),
    "train.rollouts.num_generations": OtherNames("num_generations", "num_generations", ""),
    "train.rollouts.max_completion_length": OtherNames("max_completion_length", "max_completion_length", ""),
    "train.rollouts.updates": OtherNames("num_iterations", "num_iterations", ""),
    "train.run.trackers": OtherNames("report_to", "use_wandb use_mlflow", "report_to"),
}


def find_ours(name: str) -> tuple[str, ...]:
    """Our settings, by their paths, that another tool calls `name`."""
    return tuple(ours for ours, others in OTHER_NAMES.items() if name in " ".join(others).split())
