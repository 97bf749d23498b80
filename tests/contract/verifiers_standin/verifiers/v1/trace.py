from verifiers.v1.core import ModelCall, TraceTask

__all__ = ["ModelCall", "TraceTask"]
