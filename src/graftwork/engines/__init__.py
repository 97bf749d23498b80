"""Engines that answer prompts: embedded, llama.cpp and endpoints. Knows no case and no grade."""
