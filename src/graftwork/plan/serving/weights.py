"""How many bytes the weights of a model take in the formats that engines read. Exact but for headers. Pure.

On a card: FP8 or INT8 with a scale a row, 4 bits as AWQ and GPTQ store them; embeddings and head stay in 16.
llama.cpp: Q8_0 and Q4_K_M, tensor by tensor as its quantiser decides. Knows nothing of what quantising does
to the answers.
"""

from typing import NamedTuple

from graftwork.model.shape import linear_sizes, total_parameters
from graftwork.plan.serving.question import EngineName, Form
from graftwork.records.plan import ModelShape

FORMATS: dict[tuple[EngineName, Form], str] = {
    ("vllm", "16 bits"): "BF16 / FP16",
    ("vllm", "8 bits"): "FP8 / INT8",
    ("vllm", "4 bits"): "AWQ / GPTQ",
    ("llama.cpp", "32 bits"): "F32",
    ("llama.cpp", "16 bits"): "BF16 / F16",
    ("llama.cpp", "8 bits"): "Q8_0",
    ("llama.cpp", "4 bits"): "Q4_K_M",
    ("embedded", "32 bits"): "float32",
}
PLAIN_BITS: dict[Form, float] = {"32 bits": 32.0, "16 bits": 16.0, "8 bits": 8.0, "4 bits": 4.0}

GROUP_BITS = 4 + 16 / 128 + 4 / 128
"""AWQ and GPTQ: a scale of 16 bits and a zero point of 4 for 128 weights."""
ROW_SCALE_BITS = 32
Q8_0 = 8.5
"""A block of 32 weights in a byte each, with a scale of two."""
Q5_0, Q4_K, Q5_K, Q6_K = 5.5, 4.5, 5.5, 6.5625
K_BLOCK = 256
"""Rows that cannot be cut into blocks of 256 get Q5_0 for Q4_K, and Q8_0 for Q6_K."""


class WeightBytes(NamedTuple):
    """Of one model."""

    held: float
    read: float
    """For a token that is made: all but the table of embeddings, of which one row is read."""

    def bits(self, shape: ModelShape) -> float:
        return 8 * self.held / total_parameters(shape)


def weigh(shape: ModelShape, *, form: Form, engine: EngineName) -> WeightBytes:
    """Bytes of the whole model in this form."""
    gguf = engine == "llama.cpp" and form in ("8 bits", "4 bits")
    blocks = _gguf_blocks(shape, form) if gguf else _plain_blocks(shape, form)
    table = shape.vocab_size * shape.hidden_size
    counted = table * (1 if shape.tied_embeddings else 2)
    counted += shape.layers * sum(a * b for a, b in linear_sizes(shape).values())
    # Norms and biases; GGUF keeps vectors in float32.
    rest = max(total_parameters(shape) - counted, 0) * (32 if gguf else _outer_bits(form)) / 8
    embedding = table * _embedding_bits(shape, form, gguf=gguf) / 8
    head = 0.0 if shape.tied_embeddings else table * _head_bits(shape, form, gguf=gguf) / 8
    held = blocks + embedding + head + rest
    return WeightBytes(held=held, read=held if shape.tied_embeddings else held - embedding)


def _outer_bits(form: Form) -> float:
    """Engines on a card leave what lies outside the blocks in 16 bits."""
    return max(PLAIN_BITS[form], 16.0)


def _plain_blocks(shape: ModelShape, form: Form) -> float:
    bits = 0.0
    for inputs, outputs in linear_sizes(shape).values():
        if form == "4 bits":
            bits += inputs * outputs * GROUP_BITS
        else:
            bits += inputs * outputs * PLAIN_BITS[form] + (
                ROW_SCALE_BITS * outputs if form == "8 bits" else 0
            )
    return shape.layers * bits / 8


def _gguf_blocks(shape: ModelShape, form: Form) -> float:
    bits = 0.0
    for layer in range(shape.layers):
        for path, (inputs, outputs) in linear_sizes(shape).items():
            name = path.rsplit(".", 1)[-1]
            careful = name in ("v_proj", "down_proj") and _gets_more(layer, shape.layers)
            small = Q5_K if name == "qkv_proj" else _k_bits(inputs, careful=careful)
            bits += inputs * outputs * (Q8_0 if form == "8 bits" else small)
    return bits / 8


def _gets_more(layer: int, layers: int) -> bool:
    """Q4_K_M: values and the way down of the first and last eighth, and of every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _k_bits(inputs: int, *, careful: bool) -> float:
    if inputs % K_BLOCK:
        return Q8_0 if careful else Q5_0
    return Q6_K if careful else Q4_K


def _embedding_bits(shape: ModelShape, form: Form, *, gguf: bool) -> float:
    if not gguf:
        return _outer_bits(form)
    # The table that is the head too is kept as the head is.
    return Q8_0 if form == "8 bits" else _k_bits(shape.hidden_size, careful=shape.tied_embeddings)


def _head_bits(shape: ModelShape, form: Form, *, gguf: bool) -> float:
    if not gguf:
        return _outer_bits(form)
    return Q8_0 if form == "8 bits" else _k_bits(shape.hidden_size, careful=True)
