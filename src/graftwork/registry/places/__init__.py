"""Stores of releases that lie somewhere else: any fsspec URL."""
