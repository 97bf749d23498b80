"""What is done to text alone: redact, normalise, compare, recognise by shape."""
