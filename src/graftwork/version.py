"""The version of this package, apart from the public API that everything below must not import."""

__version__ = "0.1.0"
