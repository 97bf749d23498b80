"""Logs in, a proven dataset out: read, audit, redact, de-duplicate, split, render."""
