"""Units of memory and storage."""

MIB = 2**20
GIB = 2**30

NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in NF4: its code, its share of the byte that scales 64, and of the scale of 256 of these."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the type of the weights."""
