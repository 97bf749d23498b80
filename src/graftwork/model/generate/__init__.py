"""Generating answers with a loaded model."""
