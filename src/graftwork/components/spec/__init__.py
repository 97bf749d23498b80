"""Specifications: files of two dialects in, one typed tree with cases and findings out. Runs no code."""
