"""The cost model."""
