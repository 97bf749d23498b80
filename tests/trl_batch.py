"""The model and the batches on which this package and TRL are compared; both sides build them from here.

Weights and values are sines, so that they are the same with every version of torch.
"""

import torch

VOCABULARY = 48
PROMPTS = ((5, 9, 11, 7, 20, 21, 22, 23, 30), (5, 9, 11, 7, 20, 21, 22, 23, 31, 17))
ANSWERS = ((12, 13, 2), (14, 15, 16, 18, 2), (12, 2), (19, 25, 26, 2), (27, 28, 29, 33, 34, 2), (35, 2))
ADVANTAGES = (0.75, -0.25, -0.5, 0.4, -0.9, 0.5)
MAX_TOKENS = 8
GRADIENT_OF = "model.layers.1.self_attn.q_proj.weight"
POLICY_CASES = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "kl": {"loss_type": "dapo", "beta": 0.05},
    "clip": {"loss_type": "dapo", "old": True},
    "clip_grpo": {"loss_type": "grpo", "old": True},
    "cispo": {"loss_type": "cispo", "old": True, "epsilon_high": 1.1},
    "gspo": {"loss_type": "dapo", "old": True, "level": "sequence"},
    "gspo_kl": {"loss_type": "dapo", "old": True, "level": "sequence", "beta": 0.05},
}
PREFERENCE_CASES = {
    "dpo": {"types": ["sigmoid"], "weights": [1.0], "beta": 0.1},
    "dpo_sft": {"types": ["sigmoid", "sft"], "weights": [1.0, 0.3], "beta": 0.5},
}
PAIRS = ((0, 0, 1), (0, 2, 1), (1, 3, 4))
"""Prompt, chosen answer, rejected answer."""

KTO_CASES = {
    "kto": {"beta": 0.5, "desirable": 1.0, "undesirable": 1.5, "start": -0.6},
    "kto_low": {"beta": 0.5, "desirable": 1.0, "undesirable": 1.5, "start": 0.6},
}
"""`start` is added to what the start gives crossed prompts and replies: the baseline is above 0, or 0."""
JUDGED = ((0, 0, True), (0, 1, False), (1, 3, True), (1, 4, False))
"""Prompt, answer, whether it is a good one."""


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for place, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" not in name:
                numbers = torch.arange(parameter.numel(), dtype=torch.float64)
                values = 0.3 * torch.sin(numbers * (1.7 + 0.01 * place) + place)
                parameter.copy_(values.view_as(parameter).float())
    return model.eval()


def shift(number, *, size, by):
    """Log-probabilities of another model: what to add to those of this one."""
    return by * torch.sin(torch.arange(size, dtype=torch.float32) * 1.3 + number)
