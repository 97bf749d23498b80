"""Seconds of a run before its first step: starting, loading, recording or compiling. Pure.

In: where it runs, how many parameters there are, how a card's step is tuned. Out: seconds.
"""

from graftwork.costmodel.packing import COMPILED_SHAPES
from graftwork.records.plan import Tuning

START_SECONDS = {"cpu": 10.0, "cuda": 11.5}
"""Interpreter, libraries and a small base, and on a card its kernels (SmolLM2: 11 s on two cores, 12 s
on an H200)."""
VALIDATION_SECONDS = {"cpu": 0.0, "cuda": 2.5}
"""What the last look at the validation rows takes besides their tokens: nothing of it is recorded (H200)."""
CHECKPOINT_SECONDS = {"cpu": 0.15, "cuda": 0.04}
RECORDED_SIZES = 8
"""Sizes of packs that a run meets, each run plainly and then recorded."""
PLAIN_PASS_A_LAYER = 0.004
"""Seconds of the host for a layer, forward and backward, where nothing is recorded yet (H200)."""
READ_BYTES_S = {"cpu": 1.5e9, "cuda": 1.5e9}
"""From the disk into memory or onto the card (derived: a usual NVMe disk, half of its stated rate)."""
BYTES_A_PARAMETER = 2
COMPILE_SECONDS = 8.0
"""For each size of batch; half a minute for all of them (H200 with 16 cores: settling took 15 to 29 s)."""


COMPILING_PAYS_SECONDS = 120.0
"""A shorter run is over before its layers are compiled: up to half a minute for each size of batch."""


def compiling_pays(tuning: Tuning, *, tokens: float) -> bool:
    """Whether a run of so many tokens is long enough for its layers to be compiled."""
    return tuning.seconds_a_token * tokens > COMPILING_PAYS_SECONDS


def recording_seconds(tuning: Tuning, *, layers: int, steps: int) -> float:
    """What a run spends on recording the sizes of its packs while it trains."""
    if tuning.compiled or not tuning.recorded:
        return 0.0
    return 2 * min(RECORDED_SIZES, steps) * layers * PLAIN_PASS_A_LAYER


def start_seconds(kind: str, *, parameters: int, tuning: Tuning | None = None) -> float:
    """From the start of a run to its first step."""
    loading = parameters * BYTES_A_PARAMETER / READ_BYTES_S[kind]
    compiling = COMPILE_SECONDS * COMPILED_SHAPES if tuning is not None and tuning.compiled else 0.0
    return START_SECONDS[kind] + loading + compiling
