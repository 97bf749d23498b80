"""Fingerprints, candidate pairs (LSH), questions, duplicates and contradictions."""
