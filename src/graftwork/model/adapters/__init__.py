"""LoRA, DoRA and full fine-tuning: the adapters, their shapes and the PEFT folder format."""
