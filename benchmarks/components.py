"""Verified answers a second: sources of the converter's components against their cases, in batches.

The sources of `examples/converter` are verified again and again, one batch at a time, as generation does it.
Figures are medians over rounds. Processor time is that of all processes together: on a busy machine it says
more than answers a second.

Run: `python benchmarks/components.py [--answers N] [--rounds N] [--json]`.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

from graftwork.components.generate.attempts import source_of
from graftwork.components.generate.model import RecordedEngine
from graftwork.components.generate.prompts import write_prompt
from graftwork.components.spec.component import load_plan
from graftwork.components.verify.verifier import Submission, Verifier
from graftwork.inference.engine import DecodingSettings
from graftwork.process.sandbox import Limits, Sandbox, available

EXAMPLE = Path(__file__).parents[1] / "examples" / "converter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    plan = load_plan(EXAMPLE / "converter.tiki")
    engine = RecordedEngine(EXAMPLE / "answers.jsonl")
    simple = [component for component in plan.components if not component.dependencies]
    sources = []
    for component in simple:
        prompt = engine.render(write_prompt(plan, component, 1))
        [reply] = engine.answer([prompt], DecodingSettings(512))
        sources.append(Submission(component, source_of({"text": reply.text}, "python"), 1))
    batch = [sources[number % len(sources)] for number in range(arguments.answers)]
    kind = available()
    verifier = Verifier(plan, Sandbox(kind, Limits(wall_seconds=20, cpu_seconds=20)))
    rates, costs = [], []
    for _ in range(arguments.rounds):
        begun, spent = time.perf_counter(), processor_seconds()
        verifier.verify(batch)
        rates.append(len(batch) / (time.perf_counter() - begun))
        costs.append((processor_seconds() - spent) / len(batch))
    found = {
        "sandbox": str(kind),
        "answers": len(batch),
        "per_second": round(statistics.median(rates), 1),
        "processor_ms": round(1000 * statistics.median(costs), 1),
        "load": os.getloadavg()[0],
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['per_second']} verified answers a second ({kind}); load {found['load']:.1f}")
    print(f"{found['processor_ms']} ms of processor time each")


def processor_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
