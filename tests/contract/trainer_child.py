"""Plain transformers on the files that `graft plan fit --write` wrote: no code of graftwork is imported here.

Run in the folder of the files: `trainer_child.py STEPS [deepspeed|accelerate]`. Prints the losses as JSON.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


# A kernel of DeepSpeed for processors, which it would compile at the first run.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(steps: int, how: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stated = json.loads(Path("ds_config.json").read_text())
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=steps,
        per_device_train_batch_size=stated["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=stated["gradient_accumulation_steps"],
        learning_rate=stated.get("optimizer", {}).get("params", {}).get("lr", 2e-2),
        weight_decay=0.0,
        max_grad_norm=stated["gradient_clipping"],
        lr_scheduler_type="constant",
        bf16=stated["bf16"]["enabled"],
        fp16=stated["fp16"]["enabled"],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
        deepspeed="ds_config.json" if how == "deepspeed" else None,
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if "optimizer" not in stated:
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    tokens = torch.arange(16).repeat(stated["train_batch_size"] * steps, 1)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    engine = trainer.model_wrapped
    found = {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "engine": type(engine).__name__,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "processes": trainer.accelerator.num_processes,
    }
    if trainer.is_world_process_zero():
        print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
