"""A run around its steps: which step it takes, how its rows become passes, what comes before the first. Pure.

Input: a decoder's shape, what is trained of it, where and in which precision; lengths of rows, tokens of a
pass at most; how a GPU's step is tuned. Output: why it is the plain step, or None: plans and training ask
here, so that a plan is one of the step that is taken; bins of rows, and the few sizes of packs by which the
engine packs (`train/gpu`) and plans count; seconds of starting, loading, recording or compiling.
"""

from collections.abc import Sequence
from typing import Literal

from graftwork.records.plan import ModelShape, Tuning

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
    """Return why a run uses the plain step; None if it uses graft's own. `capability` is that of a GPU."""
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
            "its widths are not multiples of 64": any(width % 64 for width in widths),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


COMPILED_SHAPES, RECORDED_SHAPES = 4, 8
"""A batch is padded up to a quarter, a half, three quarters or all of the tokens of a pass if each size is
compiled; recording a size costs less, so there are twice as many sizes and half as much padding.
"""
SMALLEST_PASS = 1024
FEWEST_PLACES = 64


def bin_rows(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Return which rows go together: longest first, each into the bin with the least remaining room."""
    bins: list[list[int]] = []
    spaces: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [index for index, space in enumerate(spaces) if space >= lengths[row]]
        if fitting:
            best = min(fitting, key=lambda index: (spaces[index], index))
            bins[best].append(row)
            spaces[best] -= lengths[row]
        else:
            bins.append([row])
            spaces.append(max(room - lengths[row], 0))
    return bins


def round_tokens(count: int, *, room: int, shapes: int = COMPILED_SHAPES) -> int:
    """Round up to the next batch size."""
    step = token_step(room, shapes)
    return -(-count // step) * step


def token_step(room: int, shapes: int) -> int:
    return max(-(-room // shapes), SMALLEST_PASS // shapes)


def round_places(count: int, *, head_tokens: int) -> int:
    """Return the number of positions that the head computes: full chunks, or one whose size is a power of
    two. Replies are short, and a head of a hundred thousand columns is not computed for positions that
    predict nothing.
    """
    if count >= head_tokens:
        return -(-count // head_tokens) * head_tokens
    return min(max(1 << max(count - 1, 0).bit_length(), FEWEST_PLACES), head_tokens)


IMPORT_SECONDS = {"cpu": 7.5, "cuda": 8.5}
"""Import of interpreter and libraries, if the process is not forked from one that has them."""
OPEN_SECONDS = {"cpu": 0.5, "cuda": 2.0}
"""Time for a process whose imports are done: it reads its job, and on a GPU creates the context and runs the
first kernels.
"""
MAKE_SECONDS = {"cpu": 1.0, "cuda": 1.0}
"""Creation of a model from its file, whatever its size (SmolLM2: 0.6 s of a core, 1 s in all)."""
PREPARE_SECONDS = {"cpu": 1.0, "cuda": 0.0}
"""Rows, adapters, optimizer; on a CPU the layout of weights for its products, and the hash of the base."""
START_SECONDS = {
    kind: IMPORT_SECONDS[kind] + OPEN_SECONDS[kind] + MAKE_SECONDS[kind] + PREPARE_SECONDS[kind]
    for kind in IMPORT_SECONDS
}
"""Start of a training process with a small base in a new interpreter (SmolLM2: 11 s on two cores, 12 s on an
H200).
"""
VALIDATION_SECONDS = {"cpu": 0.0, "cuda": 2.5}
"""Overhead of the last validation, besides its tokens: nothing of it is recorded (H200)."""
CHECKPOINT_SECONDS = {"cpu": 0.15, "cuda": 0.04}
RECORDED_SIZES = 8
"""Sizes of packs in a run, each run eagerly first and then recorded."""
PLAIN_PASS_PER_LAYER = 0.004
"""Host time per layer, forward and backward, if nothing is recorded yet (H200)."""
READ_BYTES_S = {"cpu": 1.5e9, "cuda": 1.5e9}
"""From the disk into memory or onto the GPU (derived: a usual NVMe disk, half of its stated rate)."""
BYTES_PER_PARAMETER = 2
COMPILE_SECONDS = 8.0
"""For each batch size; half a minute for all of them (H200 with 16 cores: warm-up took 15 to 29 s)."""


COMPILING_PAYS_SECONDS = 120.0
"""A shorter run ends before its layers are compiled: up to half a minute for each batch size."""


def compiling_pays(tuning: Tuning, *, tokens: float) -> bool:
    """Return whether a run of this many tokens is long enough to compile its layers."""
    return tuning.seconds_per_token * tokens > COMPILING_PAYS_SECONDS


def recording_seconds(tuning: Tuning, *, layers: int, steps: int) -> float:
    """Return the time that a run spends recording the sizes of its packs while it trains."""
    if tuning.compiled or not tuning.recorded:
        return 0.0
    return 2 * min(RECORDED_SIZES, steps) * layers * PLAIN_PASS_PER_LAYER


def engine_start(kind: str, *, parameters: int, forked: bool) -> dict[str, float]:
    """From the start of a process to its model in memory."""
    return {
        "imports": 0.0 if forked else IMPORT_SECONDS[kind],
        "open": OPEN_SECONDS[kind],
        "load": MAKE_SECONDS[kind] + parameters * BYTES_PER_PARAMETER / READ_BYTES_S[kind],
    }


def start_seconds(kind: str, *, parameters: int, tuning: Tuning | None = None, forked: bool = False) -> float:
    """From the start of a run to its first step. `forked`: from a process that has done the imports."""
    started = sum(engine_start(kind, parameters=parameters, forked=forked).values())
    compiling = COMPILE_SECONDS * COMPILED_SHAPES if tuning is not None and tuning.compiled else 0.0
    return started + PREPARE_SECONDS[kind] + compiling
