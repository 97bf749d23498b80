"""The CPU step: a faster forward pass for known decoders."""
