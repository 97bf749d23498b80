"""Units of memory and storage."""

MIB = 2**20
GIB = 2**30
