"""Engines that answer prompts: embedded, vLLM and OpenAI-compatible endpoints. Knows no case and no grade."""
