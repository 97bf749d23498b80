"""Tiny random decoders of many families, for what must hold whatever a model's parts are called."""

from functools import partial

import torch
import transformers as t

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WITHOUT_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 128}

FAMILIES = {
    "llama": partial(t.LlamaConfig, **SIZES),
    "qwen2": partial(t.Qwen2Config, **SIZES),
    "qwen3": partial(t.Qwen3Config, **SIZES, head_dim=16),
    "mistral": partial(t.MistralConfig, **SIZES),
    "olmo2": partial(t.Olmo2Config, **SIZES),
    # The cap is low, so that it matters for the small logits of a random model.
    "gemma2": partial(t.Gemma2Config, **SIZES, head_dim=16, final_logit_softcapping=0.5),
    "gpt_neox": partial(t.GPTNeoXConfig, **WITHOUT_GROUPS),
    "phi3": partial(t.Phi3Config, **SIZES),
    "gpt2": partial(t.GPT2Config, **GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "granite": partial(t.GraniteConfig, **SIZES, logits_scaling=7.0),
    "cohere": partial(t.CohereConfig, **SIZES, logit_scale=0.3),
}
ALL = sorted(FAMILIES)


def make(family):
    torch.manual_seed(4)
    model = t.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # Larger than the usual first weights: else no model is sure of anything.
                parameter.mul_(4)
    model.requires_grad_(False)
    return model.eval()
