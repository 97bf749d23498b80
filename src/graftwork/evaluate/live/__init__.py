"""Comparisons on live traffic: A/B, canaries, shadows, drift."""
