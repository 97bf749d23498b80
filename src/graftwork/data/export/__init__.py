"""Exports datasets in the formats of other tools. `run.Exporter` says what a format provides."""
