"""Units of memory and storage."""

MIB = 2**20
GIB = 2**30

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the type of the weights."""
