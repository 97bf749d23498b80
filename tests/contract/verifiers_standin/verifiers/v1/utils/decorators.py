from verifiers.v1.core import invoke

__all__ = ["invoke"]
