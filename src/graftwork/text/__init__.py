"""Text utilities: redaction, normalization, similarity, checks by form."""
