"""Tiny random decoders of every family that graft's own steps compute, with what is particular to each."""

from functools import partial

import torch
import transformers as t

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDTH = {"head_dim": 16}
WINDOW = {"sliding_window": 8}
TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# Caps are low, so that they matter for the small scores of a random model.
FAMILIES = {
    "llama": partial(t.LlamaConfig, **SIZES),
    "mistral": partial(t.MistralConfig, **SIZES, **WINDOW),
    "qwen2": partial(t.Qwen2Config, **SIZES),
    "qwen3": partial(t.Qwen3Config, **SIZES, **WIDTH),
    "olmo2": partial(t.Olmo2Config, **SIZES),
    "olmo3": partial(t.Olmo3Config, **SIZES, **WINDOW),
    "gemma": partial(t.GemmaConfig, **SIZES, **WIDTH),
    "gemma2": partial(
        t.Gemma2Config,
        **SIZES,
        **WIDTH,
        **WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=1.5,
    ),
    "gemma3_text": partial(t.Gemma3TextConfig, **SIZES, **WIDTH, **WINDOW, **TYPES, query_pre_attn_scalar=24),
    "starcoder2": partial(t.Starcoder2Config, **SIZES, **WINDOW),
    "granite": partial(
        t.GraniteConfig,
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "phi3": partial(t.Phi3Config, **SIZES, sliding_window=9),
    "smollm3": partial(t.SmolLM3Config, **SIZES, no_rope_layer_interval=2),
    "cohere": partial(t.CohereConfig, **SIZES, logit_scale=0.3),
    "cohere2": partial(t.Cohere2Config, **SIZES, **WIDTH, **WINDOW, logit_scale=0.3),
}
ALL = sorted(FAMILIES)


def make(family, *, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = FAMILIES[family](**changes)
    model = t.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # Larger than the usual first weights: else no model is sure of anything.
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval().requires_grad_(False)
