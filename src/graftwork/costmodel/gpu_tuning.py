"""Chooses how graft's own step spends a GPU's memory: the fastest setting that fits. Pure.

Input: a decoder's shape, what is trained, the memory limit, the rates of the GPU. Output: a Tuning, or None.
Settings are tried in the order of their seconds, which no limit changes, and a higher limit rejects none that
a lower one accepted: more memory never gives a slower answer. A replayed allocator may succeed under one
limit and fail under a higher one, so a setting is tried under limits of its own (`own_limits`), which do not
depend on the GPU. The limit of the chosen tuning may be a little lower than the given one. A tuning that was
measured (`keep_measured`) keeps more where memory is left.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from graftwork.costmodel.allocator import LARGE_SEGMENT, ROUND_LARGE
from graftwork.costmodel.gpu_memory import (
    SLACK,
    SPARE,
    StepBytes,
    count_by_levels,
    extra_bytes,
    load_peak,
    reserved_within,
    weights_again,
)
from graftwork.costmodel.gpu_step import (
    WORKSPACE,
    hold_recording,
    hold_stacks,
    hold_states,
    step_recipe,
    take_pass,
)
from graftwork.costmodel.gpu_tensors import ByteTally
from graftwork.costmodel.gpu_time import TrainedPart, gpu_seconds_per_token
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.run import compiling_pays
from graftwork.records.base import GIB, MIB
from graftwork.records.plan import ModelShape, Tuning

WITHOUT_END = float(2**20)
"""GiB: a limit that is never reached."""
PARTS = 64
BEYOND = (0, 2, 6, 14, 30, 64)
"""Distances of candidate limits above the one with the allocator's margin, in parts of what a pass
allocates.
"""
WITHIN = (0, 1, 2, 3)
"""Distances of candidate limits within that margin, in fourths of it."""
PART_FILLED = 32 * MIB
"""Minimum overhead of the allocator's pages: spares replays that cannot fit."""
HUNDREDTHS = 100
"""Candidate limits are whole hundredths of a GiB, as project files state them."""


def with_room(
    shape: ModelShape, tuning: Tuning, counted: StepBytes, *, trainable: int, adapted: int, scant: bool
) -> Tuning | None:
    """Add the allocator's margin. `counted`: bytes that the setting requests; `scant`: it is also tried
    without the margin.
    """
    limit = tuning.limit_gib
    walk, tally = step_recipe(shape, tuning, trainable=trainable, adapted=adapted), ByteTally()
    tally.alloc(WORKSPACE)
    hold_recording(tally, walk)
    hold_stacks(tally, walk.sizes, walk.adapted)
    hold_states(tally, walk.sizes, walk.adapted)
    take_pass(tally, walk, keep_gradients=False)
    # The most that the allocator wants of the GPU at once.
    pressing = max(-(-tally.largest // ROUND_LARGE) * ROUND_LARGE, LARGE_SEGMENT) + SPARE

    def under(limit_gib: float) -> Tuning | None:
        limited = tuning.model_copy(update={"limit_gib": limit_gib})
        reserved = reserved_within(shape, limited, trainable=trainable, adapted=adapted)
        return None if reserved is None else limited.model_copy(update={"peak_gib": reserved / GIB})

    if with_margin(counted) + pressing <= limit * GIB:
        free = under(WITHOUT_END)
        if free is not None and free.peak_gib * GIB + pressing <= limit * GIB:
            return free.model_copy(update={"limit_gib": limit})
    for own_limit in sorted(
        {own_limit for own_limit in own_limits(counted, scant=scant) if own_limit <= limit}, reverse=True
    ):
        tuned = under(own_limit)
        if tuned is not None:
            # All that there is, where that is much more and the allocator gets along with it, too.
            much = (limit - own_limit) * GIB > 2 * counted.passing / PARTS
            return (under(limit) if much else None) or tuned
    return None


def room_with_margin(remaining: float) -> float:
    """Bytes that a pass may request, of what is left besides the lasting bytes, to be worth a replay."""
    return min(remaining / SLACK, remaining - SPARE - PART_FILLED)


def with_margin(counted: StepBytes) -> float:
    """The inverse: the lowest limit under which a setting is worth a replay."""
    return counted.standing + max(SLACK * counted.passing, counted.passing + SPARE + PART_FILLED)


def own_limits(counted: StepBytes, *, scant: bool) -> Iterator[float]:
    """Candidate limits in GiB, ascending: always the same for the same request."""
    base = with_margin(counted)
    if scant:
        least = counted.asked + SPARE
        yield from (_hundredths(least + (base - least) * part / 4) for part in WITHIN)
    yield from (_hundredths(base + counted.passing * parts / PARTS) for parts in BEYOND)


def _hundredths(limit: float) -> float:
    return math.ceil(limit * HUNDREDTHS / GIB) / HUNDREDTHS


GRAIN = 256
"""Passes are counted in whole pages of the allocator, and in larger grains if much is lasting: a request only
slightly smaller than one that failed is not replayed.
"""


class TuningOption:
    """A setting whose levels are not chosen yet. Time is linear in each of the two levels."""

    def __init__(self, shape: ModelShape, tuning: Tuning, trained: TrainedPart) -> None:
        self.shape, self.tuning, self.trained = shape, tuning, trained

    def seconds(self, keep: int, lean: int) -> float:
        nothing, keeping, leaning = self._line
        return nothing + keep * keeping + lean * leaning

    @cached_property
    def _line(self) -> tuple[float, float, float]:
        nothing = self.estimate(0, 0)
        return nothing, self.estimate(1, 0) - nothing, self.estimate(0, 1) - nothing

    def estimate(self, keep: int, lean: int) -> float:
        return gpu_seconds_per_token(
            self.shape, self.tuning.model_copy(update={"keep": keep, "lean": lean}), self.trained
        )

    def count(self, keep: int, lean: int) -> StepBytes:
        """Bytes in whole grains."""
        standing, passing = self._count(keep, lean)
        grain = _grain(standing)
        return StepBytes(standing, -(-passing // grain) * grain)

    @cached_property
    def _count(self) -> Callable[[int, int], StepBytes]:
        return count_by_levels(
            self.shape, self.tuning, trainable=self.trained.trainable, adapted=self.trained.adapted
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Settings of one kind load the same tensors onto the GPU."""
        return self.tuning.head, self.tuning.turned, self.tuning.host_embedding

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.tuning.micro_tokens, self.tuning.head_tokens, self.tuning.chunk_tokens

    def fullest(self) -> Iterator[tuple[int, int]]:
        """Return (keep, lean) for each number of blocks that keep: as many lean ones as seem to fit."""
        lean = adapted = self.trained.adapted
        for keep in range(adapted + 1):
            lean = min(lean, adapted - keep)
            while lean >= 0 and not self.seems_to_fit(keep, lean):
                lean -= 1
            if lean < 0:
                return
            yield keep, lean

    def seems_to_fit(self, keep: int, lean: int) -> bool:
        return self._count(keep, lean).passing <= self._room

    @cached_property
    def _room(self) -> float:
        """Room for a pass, in whole grains, with the allocator's minimum margin."""
        standing = self._count(0, 0).standing
        grain = _grain(standing)
        return room_with_margin(self.tuning.limit_gib * GIB - standing) // grain * grain

    def replayed(self, keep: int, lean: int, *, scant: bool = False) -> Tuning | None:
        """Return the setting with the memory that the allocator would really hold; None if that exceeds the
        limit.
        """
        tuning = with_room(
            self.shape,
            self.tuning.model_copy(update={"keep": keep, "lean": lean}),
            self.count(keep, lean),
            trainable=self.trained.trainable,
            adapted=self.trained.adapted,
            scant=scant,
        )
        return tuning and tuning.model_copy(update={"seconds_per_token": self.estimate(keep, lean)})


def _grain(standing: int) -> int:
    return max(standing // GRAIN // LARGE_SEGMENT, 1) * LARGE_SEGMENT


class TuningCandidate(NamedTuple):
    """Ordered for a heap: the fastest first."""

    seconds: float
    way: int
    keep: int
    lean: int
    opened: bool
    """Whether these are levels that seem to fit, or the best that the setting could ever reach."""


def fastest(shape: ModelShape, settings: Sequence[Tuning], trained: TrainedPart) -> Tuning | None:
    """Return the fastest setting that fits, over all settings and levels."""
    ways = [TuningOption(shape, tuning, trained) for tuning in settings]
    failed, most, least = Failed(), trained.adapted, smallest(ways)
    heap = [TuningCandidate(way.estimate(most, 0), index, most, 0, False) for index, way in enumerate(ways)]
    heap += [TuningCandidate(ways[index].seconds(0, 0), index, 0, 0, True) for index in least]
    heapq.heapify(heap)
    while heap:
        best = heapq.heappop(heap)
        way = ways[best.way]
        if not best.opened:
            for keep, lean in way.fullest():
                heapq.heappush(heap, TuningCandidate(way.seconds(keep, lean), best.way, keep, lean, True))
            continue
        counted = way.count(best.keep, best.lean)
        scant = best.way in least and best.keep + best.lean == 0
        if scant or not failed.foretell(way, counted):
            least -= {best.way} if scant else set()
            fitting = way.replayed(best.keep, best.lean, scant=scant)
            if fitting is not None:
                return fitting
            failed.add(way, counted)
        if best.lean:
            fewer = best.lean - 1
            heapq.heappush(heap, best._replace(seconds=way.seconds(best.keep, fewer), lean=fewer))
    return None


def smallest(ways: Sequence[TuningOption]) -> set[int]:
    """For each kind, return the candidate with the fewest tokens per micro-batch. It is tried in its turn
    even if the allocator's margin leaves no room and whatever failed before. One of each kind, since more
    memory lets more kinds load.
    """
    smallest_by_kind: dict[tuple[object, ...], int] = {}
    for index in sorted(range(len(ways)), key=lambda index: ways[index].tokens):
        smallest_by_kind.setdefault(ways[index].kind, index)
    return set(smallest_by_kind.values())


class Failed:
    """Settings that failed. A setting of the same kind that requests no less fails too and is not replayed.
    This keeps the promise of this module: under a lower limit what failed here would fail as well, so nothing
    is skipped here that would be accepted there.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[object, ...], list[StepBytes]] = {}

    def add(self, way: TuningOption, counted: StepBytes) -> None:
        self._by_kind.setdefault(way.kind, []).append(counted)

    def foretell(self, way: TuningOption, counted: StepBytes) -> bool:
        # Lasting bytes count by themselves: more of them may not even seem to fit.
        return any(
            item.standing <= counted.standing and item.passing <= counted.passing
            for item in self._by_kind.get(way.kind, ())
        )


GPU_SHARE = 0.94
"""Share of a GPU's memory to use, unless the settings state a limit; the rest is for the driver and the
display.
"""
FIRST_WITH_EIGHT = 8.9
"""Compute capability of Ada; Hopper is 9.0."""

TOKENS = (1024, 2048, 4096, 8192, 16384)
HEAD_TOKENS = (2048, 1024, 512, 256)
CHUNK_TOKENS = (4096, 2048, 1024)


class TuningRequest(NamedTuple):
    """The properties of a run that decide how its step is tuned."""

    method: str
    adapted: int
    trainable: int
    step_tokens: int
    longest: int
    eight: bool
    """Frozen weights may be multiplied in 8 bits."""
    compile: Literal["auto", "on", "off"] = "on"
    run_tokens: float = math.inf
    """Tokens of the whole run, which `auto` decides by."""


def choose_tuning(
    shape: ModelShape, request: TuningRequest, *, limit_gib: float, rates: StepRates
) -> Tuning | None:
    """Choose the fastest setting within the limit; None if nothing fits. `rates` are those of the GPU. A step
    that is not compiled needs more memory at once: if it does not fit, the layers are compiled.
    """
    compiled = _choose(shape, request, limit_gib=limit_gib, rates=rates, compiled=True)
    if compiled is None or request.compile == "on":
        return compiled
    if request.compile == "auto" and compiling_pays(compiled, tokens=request.run_tokens):
        return compiled
    return _choose(shape, request, limit_gib=limit_gib, rates=rates, compiled=False) or compiled


def _choose(
    shape: ModelShape, request: TuningRequest, *, limit_gib: float, rates: StepRates, compiled: bool
) -> Tuning | None:
    form: Literal["whole", "eight", "four"] = "whole"
    if request.method == "qlora":
        form = "four"
    elif request.eight:
        form = "eight"
    # Those whose weights come onto the GPU at all.
    needed: dict[tuple[str, bool, bool], int] = {}
    loadable = []
    for head in heads(shape, eight=request.eight):
        for tuning in _settings(form, head, request, limit_gib=limit_gib, compiled=compiled):
            key = (tuning.head, tuning.turned, tuning.host_embedding)
            if key not in needed:
                needed[key] = load_peak(shape, tuning)
            if needed[key] <= limit_gib * GIB:
                loadable.append(tuning)
    return fastest(shape, loadable, TrainedPart(request.adapted, request.trainable, rates))


def heads(shape: ModelShape, *, eight: bool) -> tuple[Literal["whole", "eight"], ...]:
    """Precisions that the head may have, fastest first. 8-bit products need sizes divisible by 16."""
    return ("eight", "whole") if eight and shape.vocab_size % 16 == 0 else ("whole",)


def _settings(
    form: Literal["whole", "eight", "four"],
    head: Literal["whole", "eight"],
    request: TuningRequest,
    *,
    limit_gib: float,
    compiled: bool,
) -> Iterator[Tuning]:
    """All settings to try. A pass must fit the longest row, and be no larger than a step."""
    longest = request.longest
    most = max(request.step_tokens, longest)
    tokens = sorted({min(max(size, longest), most) for size in TOKENS})
    turns = (False, True) if form == "eight" else (False,)
    goes = {
        (micro, min(head_tokens, micro), min(chunk, micro))
        for micro, head_tokens, chunk in product(tokens, HEAD_TOKENS, CHUNK_TOKENS)
    }
    for (micro, head_tokens, chunk), turned, host in product(sorted(goes), turns, (False, True)):
        yield Tuning(
            form=form,
            head=head,
            micro_tokens=micro,
            longest=longest,
            keep=0,
            lean=0,
            chunk_tokens=chunk,
            head_tokens=head_tokens,
            turned=turned,
            host_embedding=host,
            compiled=compiled,
            recorded=True,
            limit_gib=limit_gib,
            peak_gib=0.0,
            seconds_per_token=0.0,
        )


def best_levels(shape: ModelShape, room: float, *, tokens: int, adapted: int) -> tuple[int, int]:
    """Return (keep, lean) that fit into `room` bytes and need the least recomputation."""
    keeping, leaning = (extra_bytes(shape, level) * tokens for level in ("keep", "lean"))
    best, least = (0, 0), weights_again(shape, (0, 0), adapted)
    for keep in range(adapted + 1):
        remaining = room - keep * keeping
        if remaining < 0:
            break
        lean = min(adapted - keep, int(remaining // leaning))
        if (again := weights_again(shape, (keep, lean), adapted)) < least:
            best, least = (keep, lean), again
    return best


def keep_measured(tuning: Tuning, shape: ModelShape, *, measured_gib: float, adapted: int) -> Tuning:
    """Choose the levels again, from a measured step in which every block saved only its input. Blocks may use
    the room between the limit and the measured peak.
    """
    room = (tuning.limit_gib - measured_gib) * GIB / SLACK
    keep, lean = best_levels(shape, room, tokens=tuning.micro_tokens, adapted=adapted)
    return tuning.model_copy(update={"keep": keep, "lean": lean})


def describe_tuning(tuning: Tuning) -> str:
    """Describe a tuning in a sentence, for plans and for the message at the start of a run."""
    form = {"whole": "16 bits", "eight": "8 bits, multiplied in 8 bits", "four": "4 bits (NF4)"}[tuning.form]
    where = ", the embedding on the host" if tuning.host_embedding else ""
    return (
        f"frozen weights in {form}{where}; {tuning.micro_tokens:,} tokens at a time; "
        f"{tuning.keep} layers keep all activations, {tuning.lean} all but the widest; "
        f"{tuning.peak_gib:.1f} of {tuning.limit_gib:.1f} GiB"
    )
