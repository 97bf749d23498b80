"""Exports datasets in the formats of other tools. `formats.Exporter` says what a format provides."""
