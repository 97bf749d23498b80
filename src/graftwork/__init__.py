"""Graftwork turns a team's own agent logs into better small models."""

__version__ = "0.1.0"
