"""The fast path: a decoder whose forward and backward are written out, so that nothing is kept unasked."""
