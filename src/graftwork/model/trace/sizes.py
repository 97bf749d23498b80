"""What kernels take inside one operation, by shape: what their host code allocates. Pure: no torch."""

from graftwork.records.units import MIB

ROUND_QUERIES = 128
CUBLAS_WORKSPACE = 32 * MIB
"""What PyTorch gives a cuBLAS handle on Hopper; the forward and the backward thread have one each."""
QUANTISED_BLOCK, SCALES_BLOCK = 64, 256
"""NF4: weights that share a scale, and scales that share one of their own."""


def flash_backward_sizes(
    rows: int, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int, width: int
) -> list[int]:
    """The queries' gradients summed in float32, a row of sums; keys and values spread over the heads."""
    padded = -(-queries // ROUND_QUERIES) * ROUND_QUERIES
    wide = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
    sizes = [rows * heads * padded * 4, rows * padded * heads * wide * 4]
    if kv_heads != heads:
        sizes += [rows * keys * heads * head_dim * width] * 2
    return sizes


def dequantised_sizes(weights: int, width: int) -> list[int]:
    """The weights in the type of the product, and the scales of their blocks in float32."""
    return [weights // QUANTISED_BLOCK * 4, weights * width]


def tile_places(places: int, width: int, vocabulary: int) -> int:
    """As many places that their logits take what the hidden states do, as a power of two."""
    share = -(-places // -(-vocabulary // width))
    return min(1 << (share - 1).bit_length(), places)
