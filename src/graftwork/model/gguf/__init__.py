"""GGUF files: a base and its LoRA adapters as llama.cpp reads them."""
