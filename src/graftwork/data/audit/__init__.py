"""Findings about logs: checks of single rows, and findings about the corpus."""
