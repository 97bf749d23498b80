"""Configurations that look right and are not: read, put into one form, held against a table of rules."""
