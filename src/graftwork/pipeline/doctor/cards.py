"""The cards: by the driver's own command, and by torch in a process of its own where it is installed.

In: what both print. Out: checks with name, driver, CUDA, memory, compute capability and precisions. The
control side never loads torch.
"""

import csv
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from graftwork.pipeline.doctor.check import Check, decide
from graftwork.records.errors import pip_install
from graftwork.records.hardware import FIRST_WITH_BF16, FIRST_WITH_FP8

QUERY = ("name", "driver_version", "memory.total", "memory.free", "compute_cap")
PATIENCE_SECONDS = 90.0
"""torch alone takes that long to load from a cold network disk."""
MOSTLY_FREE = 0.9

ASK_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": there,
    "arches": torch.cuda.get_arch_list() if there else [],
    "cards": [[torch.cuda.get_device_name(at), *torch.cuda.get_device_capability(at)]
              for at in range(torch.cuda.device_count())] if there else [],
}))
"""


class Card(NamedTuple):
    name: str
    driver: str
    total_gib: float
    free_gib: float
    capability: float | None


class TorchSight(NamedTuple):
    """What torch sees of the cards."""

    version: str
    cuda: str | None
    available: bool
    arches: tuple[str, ...]
    cards: tuple[tuple[str, int, int], ...]


def look_at_cards() -> Iterator[Check]:
    command = shutil.which("nvidia-smi")
    if command is None:
        yield Check(name="gpu", result="note", found="none: training runs on the processor")
        return
    printed = _run([command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    cards = parse_cards(printed or "")
    if not cards:
        yield Check(
            name="gpu",
            result="missing",
            found="nvidia-smi is there, but shows no card",
            fix="look at `nvidia-smi`: the driver is not loaded, or the container got no card (--gpus all)",
        )
        return
    yield from describe_cards(cards)
    yield from judge_torch(_ask_torch(), cards)


def parse_cards(printed: str) -> tuple[Card, ...]:
    """Lines of `nvidia-smi --query-gpu`; an old driver does not know compute_cap and says so in its place."""
    found = []
    for fields in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(fields) != len(QUERY):
            continue
        total, free = _number(fields[2]), _number(fields[3])
        if total is not None:
            found.append(
                Card(
                    fields[0].strip(),
                    fields[1].strip(),
                    total / 1024,
                    (free or 0.0) / 1024,
                    _number(fields[4]),
                )
            )
    return tuple(found)


def describe_cards(cards: tuple[Card, ...]) -> Iterator[Check]:
    """The card or cards, what is free of them, and what they multiply in."""
    first = cards[0]
    names = first.name if len(cards) == 1 else f"{len(cards)} × {first.name}"
    if len({card.name for card in cards}) > 1:
        names = ", ".join(card.name for card in cards)
    yield Check(name="gpu", result="ok", found=f"{names}, {first.total_gib:.1f} GiB, driver {first.driver}")
    fullest = min(cards, key=lambda card: card.free_gib / card.total_gib)
    yield decide(
        "gpu memory",
        fullest.free_gib >= MOSTLY_FREE * fullest.total_gib,
        f"{fullest.free_gib:.1f} of {fullest.total_gib:.1f} GiB free",
        "`nvidia-smi` lists who holds the rest; plans reckon with an empty card",
        otherwise="note",
    )
    ages = [card.capability for card in cards if card.capability is not None]
    if ages:
        yield _precision(min(ages))


def _precision(capability: float) -> Check:
    there = ["float16"]
    if capability >= FIRST_WITH_BF16:
        there.insert(0, "bfloat16")
    if capability >= FIRST_WITH_FP8:
        there.append("FP8")
    found = f"{', '.join(there)} (compute capability {capability:g})"
    fix = "bfloat16 needs 8.0; training takes float16 with loss scaling here"
    return decide("precision", capability >= FIRST_WITH_BF16, found, fix, otherwise="note")


def judge_torch(sight: TorchSight | None, cards: tuple[Card, ...]) -> Iterator[Check]:
    """Whether torch can use what the driver shows."""
    if sight is None:
        yield Check(
            name="torch on the gpu",
            result="note",
            found="torch is not installed, or cannot be loaded",
            fix=pip_install("train"),
        )
        return
    if not sight.available:
        built = f"built for CUDA {sight.cuda}" if sight.cuda else "built without CUDA"
        yield Check(
            name="torch on the gpu",
            result="missing",
            found=f"torch {sight.version}, {built}, sees no card",
            fix="install the wheel for the driver's CUDA from pytorch.org; an older driver cannot run it",
        )
        return
    lacking = [name for name, major, minor in sight.cards if not _has_kernels(sight.arches, major, minor)]
    yield decide(
        "torch on the gpu",
        not lacking,
        f"torch {sight.version}, CUDA {sight.cuda}, {len(sight.cards)} of {len(cards)} cards",
        f"this torch has no kernels for {', '.join(lacking)}: install the CUDA 12.6 wheels for old cards, "
        "the newest for new ones",
    )


def _has_kernels(arches: tuple[str, ...], major: int, minor: int) -> bool:
    """Kernels run on later cards of their generation; PTX (`compute_`) on every later card."""
    if not arches:
        return True
    for arch in arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        made = (int(digits[:-1]), int(digits[-1]))
        if made <= (major, minor) and (kind == "compute" or made[0] == major):
            return True
    return False


def _ask_torch() -> TorchSight | None:
    if importlib.util.find_spec("torch") is None:
        return None
    printed = _run([sys.executable, "-c", ASK_TORCH])
    if not printed:
        return None
    said = json.loads(printed.splitlines()[-1])
    cards = tuple((str(name), int(major), int(minor)) for name, major, minor in said["cards"])
    return TorchSight(said["torch"], said["cuda"], said["available"], tuple(said["arches"]), cards)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
