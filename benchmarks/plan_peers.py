"""What we said of memory, what peers say of the same settings, and what was measured: one table.

In: the lines of `plan_memory.py` and `plan_memory_hf.py`. Peers' own functions are called where they can be:
accelerate's `estimate_training_usage`, DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs`. Unsloth's
estimate is part of its Studio and in no package, so it could not be run. Every error counts, misses too.

    python benchmarks/plan_peers.py tests/data/plan_memory.jsonl
    python benchmarks/plan_peers.py tests/data/plan_memory.jsonl --markdown [--into docs/accuracy.md]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plan_memory_shapes import name_of

from graftwork.model.shape import total_parameters
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WORST = 8
Line = dict[str, Any]


class Errors(NamedTuple):
    """How far off an estimate was, over all lines that it can be made for."""

    name: str
    count: int
    median: float
    most: float
    """95th percentile."""
    lowest: float
    highest: float
    """Signed: under nought is less than was measured."""


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Measured lines; those that ended in an error have nothing to compare."""
    lines = [json.loads(row) for path in paths for row in path.read_text().splitlines() if row.strip()]
    return [line for line in lines if "measured" in line and "allocated_gib" in line["measured"]]


def parameters(line: Line) -> int | None:
    shape = line["config"].get("shape")
    return None if shape is None else total_parameters(ModelShape.model_validate(shape))


def accelerate_gib(line: Line) -> float | None:
    """`accelerate estimate-memory`, the column "Training using Adam"; it knows no adapters and no lengths."""
    from accelerate.commands.estimate import estimate_training_usage

    count = parameters(line)
    if count is None:
        return None
    kind = line["config"].get("setup", {}).get("dtype", "bfloat16")
    return float(max(estimate_training_usage(4 * count, kind).values())) / GIB


def zero2_gib(line: Line) -> float | None:
    """DeepSpeed's states on one card, nothing offloaded."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    count = parameters(line)
    if count is None:
        return None
    return float(estimate_zero2_model_states_mem_needs(count, cpu_offload=False)[1]) / GIB


def zero3_gib(line: Line) -> float | None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    count = parameters(line)
    if count is None:
        return None
    shape = line["config"]["shape"]
    largest = shape["vocab_size"] * shape["hidden_size"]
    needs = estimate_zero3_model_states_mem_needs(count, largest, cpu_offload=False, cpu_offload_params=False)
    return float(needs[1]) / GIB


def four_fifths_gib(line: Line) -> float | None:
    """The rule to use no more than 80 % of a card, applied to a figure that is exact."""
    return float(line["measured"]["allocated_gib"]) / 0.8


PEERS: dict[str, Callable[[Line], float | None]] = {
    "accelerate estimate-memory": accelerate_gib,
    "DeepSpeed ZeRO-2 estimate": zero2_gib,
    "DeepSpeed ZeRO-3 estimate": zero3_gib,
    "80 % rule on an exact figure": four_fifths_gib,
}


def ours(lines: Sequence[Line], what: str, name: str) -> Errors | None:
    return summed(name, [line["predicted"][what] / line["measured"][what] - 1 for line in lines])


def today_gib(line: Line, what: str) -> float | None:
    """What the computed estimate says now of a line of plain transformers."""
    from graftwork.costmodel.plain_memory import plain_peak
    from graftwork.records.plan import PlainSetup

    if line["engine"] != "hf":
        return None
    config = line["config"]
    shape, setup = ModelShape.model_validate(config["shape"]), PlainSetup.model_validate(config["setup"])
    peak = plain_peak(shape, setup, architecture=config["architecture"])
    return (peak.allocated if what == "allocated_gib" else peak.reserved) / GIB


def today(lines: Sequence[Line], what: str, name: str) -> Errors | None:
    pairs = [(today_gib(line, what), line["measured"][what]) for line in lines]
    return summed(name, [said / was - 1 for said, was in pairs if said is not None])


def summed(name: str, errors: Sequence[float]) -> Errors | None:
    if not errors:
        return None
    sizes = sorted(abs(error) for error in errors)
    at = math.ceil(0.95 * len(sizes)) - 1
    return Errors(name, len(sizes), statistics.median(sizes), sizes[at], min(errors), max(errors))


def all_rows(lines: Sequence[Line]) -> list[Errors]:
    """Ours by engine, with what was held out apart; then the peers on all of them."""
    rows: list[Errors | None] = []
    for engine, title in (("graft", "our own step"), ("hf", "transformers + PEFT")):
        of_engine = [line for line in lines if line["engine"] == engine]
        held = [line for line in of_engine if line.get("held_out")]
        for what in ("allocated_gib", "reserved_gib"):
            kind = what.removesuffix("_gib")
            rows.append(ours(of_engine, what, f"{title}: {kind}, as written before the run"))
            rows.append(ours(held, what, f"{title}: {kind}, held-out models alone"))
            rows.append(today(of_engine, what, f"{title}: {kind}, as counted today"))
            rows.append(today(held, what, f"{title}: {kind}, as counted today, held-out models alone"))
    for name, estimate in PEERS.items():
        pairs = [(estimate(line), line["measured"]["allocated_gib"]) for line in lines]
        rows.append(summed(f"{name}: allocated", [said / was - 1 for said, was in pairs if said is not None]))
    return [row for row in rows if row is not None]


def markdown(lines: Sequence[Line]) -> str:
    """The tables of docs/accuracy.md."""
    text = ["| estimate | settings | median | 95th percentile | from | to |", "|---|---|---|---|---|---|"]
    for row in all_rows(lines):
        span = f"{row.lowest:+.1%} | {row.highest:+.1%}"
        text.append(f"| {row.name} | {row.count} | {row.median:.2%} | {row.most:.2%} | {span} |")
    text += ["", "The largest misses of what was written before the run:", ""]
    text += ["| setting | figure | said, GiB | measured, GiB | off |", "|---|---|---|---|---|"]
    misses = [
        (line["predicted"][what] / line["measured"][what] - 1, what, line)
        for line in lines
        for what in ("allocated_gib", "reserved_gib")
    ]
    for off, what, line in sorted(misses, key=lambda miss: -abs(miss[0]))[:WORST]:
        name = line["config"].get("name") or name_of(line["config"])
        said, was = line["predicted"][what], line["measured"][what]
        text.append(f"| {name} | {what.removesuffix('_gib')} | {said:.2f} | {was:.2f} | {off:+.1%} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path, nargs="+")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--into", type=Path, help="the page whose tables are replaced")
    arguments = parser.parse_args()
    lines = read_lines(arguments.lines)
    if arguments.into:
        page = arguments.into.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        arguments.into.write_text(f"{before}{BEGIN}\n{markdown(lines)}{END}{after}")
    elif arguments.markdown:
        print(markdown(lines), end="")
    else:
        for row in all_rows(lines):
            span = f"{row.lowest:+9.1%} {row.highest:+9.1%}"
            print(f"{row.name:74} {row.count:4} {row.median:9.2%} {row.most:9.2%} {span}")


if __name__ == "__main__":
    main()
