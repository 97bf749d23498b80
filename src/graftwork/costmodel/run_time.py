"""Seconds of a worker before its first step or answer: starting, loading, recording or compiling. Pure.

In: where it runs, how many parameters there are, how a GPU's step is tuned. Out: seconds.
"""

from graftwork.costmodel.packing import COMPILED_SHAPES
from graftwork.records.plan import Tuning

IMPORT_SECONDS = {"cpu": 7.5, "cuda": 8.5}
"""Interpreter and libraries, where the process is not forked from one that has them."""
OPEN_SECONDS = {"cpu": 0.5, "cuda": 2.0}
"""Of a process with its imports done: its job, and on a GPU the context and first kernels."""
MAKE_SECONDS = {"cpu": 1.0, "cuda": 1.0}
"""Making a model of its file, whatever its size (SmolLM2: 0.6 s of a core, 1 s in all)."""
PREPARE_SECONDS = {"cpu": 1.0, "cuda": 0.0}
"""Rows, adapters, optimizer; on a processor weights laid out for its products, and the hash of the base."""
START_SECONDS = {
    kind: IMPORT_SECONDS[kind] + OPEN_SECONDS[kind] + MAKE_SECONDS[kind] + PREPARE_SECONDS[kind]
    for kind in IMPORT_SECONDS
}
"""Of a training process with a small base that is a new interpreter (SmolLM2: 11 s on two cores, 12 s on an
H200)."""
VALIDATION_SECONDS = {"cpu": 0.0, "cuda": 2.5}
"""What the last look at the validation rows takes besides their tokens: nothing of it is recorded (H200)."""
CHECKPOINT_SECONDS = {"cpu": 0.15, "cuda": 0.04}
RECORDED_SIZES = 8
"""Sizes of packs that a run meets, each run plainly and then recorded."""
PLAIN_PASS_A_LAYER = 0.004
"""Seconds of the host for a layer, forward and backward, where nothing is recorded yet (H200)."""
READ_BYTES_S = {"cpu": 1.5e9, "cuda": 1.5e9}
"""From the disk into memory or onto the GPU (derived: a usual NVMe disk, half of its stated rate)."""
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


def engine_start(kind: str, *, parameters: int, forked: bool) -> dict[str, float]:
    """From the start of a process to its model in memory."""
    return {
        "imports": 0.0 if forked else IMPORT_SECONDS[kind],
        "open": OPEN_SECONDS[kind],
        "load": MAKE_SECONDS[kind] + parameters * BYTES_A_PARAMETER / READ_BYTES_S[kind],
    }


def start_seconds(kind: str, *, parameters: int, tuning: Tuning | None = None, forked: bool = False) -> float:
    """From the start of a run to its first step. `forked`: from a process that has done the imports."""
    started = sum(engine_start(kind, parameters=parameters, forked=forked).values())
    compiling = COMPILE_SECONDS * COMPILED_SHAPES if tuning is not None and tuning.compiled else 0.0
    return started + PREPARE_SECONDS[kind] + compiling
