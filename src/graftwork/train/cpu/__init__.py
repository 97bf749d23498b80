"""The CPU step: frozen layers read once and their states kept, adapted ones written out, no padding."""
