"""Each peer's model, loaded and adapted as its own documentation says, ready for a training step."""

from pathlib import Path
from typing import Any

from peers.variants import ALPHA, RANK, SEQUENCE, TARGETS, Variant


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
