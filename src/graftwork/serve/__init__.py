"""Releases in, one OpenAI-compatible endpoint out, and what it served as captures.

A gateway process (no torch) answers users; an engine child process holds the weights.
"""
