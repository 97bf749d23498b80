"""Which training step a run takes: graft's own of its device, or the plain one. Pure.

In: a decoder's shape, what is trained of it, where and in which precision. Out: why it is the plain step, or
None. Plans and training ask here, so that a plan is one of the step that is taken.
"""

from typing import Literal

from graftwork.records.plan import ModelShape

LEAST_CAPABILITY = 8.0
"""Ampere: bfloat16, and attention over rows of different lengths."""


def why_plain(
    shape: ModelShape,
    *,
    device: Literal["cpu", "cuda"],
    method: str,
    precision: str,
    devices: int = 1,
    capability: float | None = None,
) -> str | None:
    """Why a run takes the plain step; None where it takes graft's own. `capability` is that of a GPU."""
    widths = (shape.hidden_size, shape.intermediate_size)
    reasons = {"several devices share the run": devices > 1}
    if device == "cpu":
        reasons |= {
            "method full trains more than adapters": method == "full",
            f"it works in float32, not in {precision}": precision != "float32",
            shape.not_written_out or "": shape.not_written_out is not None,
        }
    else:
        reasons |= {
            "the GPU has no bfloat16: it is older than Ampere": (capability or 0) < LEAST_CAPABILITY,
            f"it works in bfloat16, not in {precision}": precision not in ("auto", "bfloat16"),
            f"method {method} is trained on the plain path": method not in ("lora", "qlora"),
            shape.not_written_out or "": shape.not_written_out is not None,
            "its widths are no multiples of 64": any(width % 64 for width in widths),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)
