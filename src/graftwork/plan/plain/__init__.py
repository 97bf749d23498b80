"""A step of transformers and PEFT by the sizes of its tensors alone: what is kept, for how long. No torch."""
