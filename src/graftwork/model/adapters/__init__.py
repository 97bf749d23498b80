"""What training changes: LoRA and DoRA layers, PEFT folders, full weights, 4-bit bases, merging."""
