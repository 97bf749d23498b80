"""Configurations that look right and are not: read, normalized, checked against a table of rules."""
