"""Models of random weights and rows of random tokens for `train_full.py` and `two_cards.py`.

Llama shapes: 6.7b and 1.4b are those of deepseek-coder-6.7b and deepseek-coder-1.3b.
"""

import random
from typing import Any

SEQUENCE, ROWS = 2048, 16
SHAPES: dict[str, dict[str, int]] = {
    "6.7b": {"hidden": 4096, "inner": 11008, "layers": 32, "heads": 32, "vocabulary": 32256},
    "3b": {"hidden": 3072, "inner": 8192, "layers": 28, "heads": 24, "vocabulary": 32256},
    "1.4b": {"hidden": 2048, "inner": 5504, "layers": 24, "heads": 16, "vocabulary": 32256},
    "nano": {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "vocabulary": 512},
    "tiny": {"hidden": 64, "inner": 128, "layers": 3, "heads": 4, "vocabulary": 512},
}
SMALL_SHAPES = ("tiny", "nano")


def step_sizes(shape: str) -> tuple[int, int]:
    """Rows of a step and tokens of a row."""
    return (4, 16) if shape in SMALL_SHAPES else (ROWS, SEQUENCE)


def make_config(shape: str) -> Any:
    from transformers import LlamaConfig

    sizes = SHAPES[shape]
    return LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        pad_token_id=None,
    )


def make_model(shape: str, dtype: Any = None) -> Any:
    """Weights from a small random pattern: drawing billions of them would take minutes."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(make_config(shape))
    model = model.to(dtype or torch.float32).to_empty(device="cpu")
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config)
    pattern = torch.randn(1 << 16, generator=torch.Generator().manual_seed(17)) * 0.02
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            flat, shifted = parameter.view(-1), pattern.roll(number)
            whole = flat.numel() // len(pattern) * len(pattern)
            flat[:whole].view(-1, len(pattern)).copy_(shifted.expand(whole // len(pattern), -1))
            flat[whole:].copy_(shifted[: flat.numel() - whole])
    return model.eval().requires_grad_(False)


def make_rows(shape: str, count: int, *, length: int) -> list[Any]:
    from graftwork.records.dataset import Row
    from graftwork.records.interaction import Message, Origin

    chance = random.Random(5)
    vocabulary = SHAPES[shape]["vocabulary"]
    return [
        Row(
            id=str(number),
            origin=Origin(file="log.jsonl", line=number + 1),
            messages=(Message(role="user", content="x"),),
            reply="y",
            tokens=tuple(chance.randrange(3, vocabulary) for _ in range(length)),
            trained_from=1,
        )
        for number in range(count)
    ]


def model_shape(shape: str) -> Any:
    from graftwork.model.shape import shape_of

    return shape_of(make_config(shape).to_dict(), name=shape)
