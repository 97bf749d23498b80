"""The demo: `graft run` on a copy of examples/cited_answers, each step with its plan and its processor time.

Run: python benchmarks/demo.py [--cases N] [--rows N] [--folder FOLDER] [--save]. Prints one line of JSON;
with a GPU the run uses it. `--cases` and `--rows` are another number of evaluated cases and of training rows:
a check of the plan at another size, for which the gate may well say no. The base is made ready before the
clock starts, since that happens once a machine. Processor seconds are those of all processes, whoever else
uses the machine.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from process_tree import TICKS, find_tree, stat_fields
from results import save_results

from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.probe import name_device

EXAMPLE = Path(__file__).parents[1] / "examples" / "cited_answers"
GRAFT = [sys.executable, "-m", "graftwork.cli.main"]
LOOK_SECONDS = 0.2
STARTED = re.compile(r"^▸ (\w+)")
BEFORE = "before the first step"


class StepClock:
    """Reads what the run prints; adds the processor time of its processes to the step that is being done."""

    def __init__(self, run: "subprocess.Popen[str]", *, show: bool) -> None:
        self._run, self._show = run, show
        self._step = BEFORE
        self._seen: dict[tuple[int, str], float] = {}
        self.processor: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        self._zero = time.perf_counter()

    def follow(self) -> float:
        """Wall seconds until the run ends."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        while self._run.poll() is None:
            self._look()
            time.sleep(LOOK_SECONDS)
        seconds = time.perf_counter() - self._zero
        reader.join()
        return seconds

    def _read(self) -> None:
        assert self._run.stderr is not None
        for line in self._run.stderr:
            if self._show:
                print(line, end="", file=sys.stderr)
            if found := STARTED.match(line):
                self._step = found[1]
                self.begun[self._step] = time.perf_counter() - self._zero

    def _look(self) -> None:
        for pid in find_tree(self._run.pid):
            fields = stat_fields(pid)
            if not fields:
                continue
            # Own time only: children are processes of the tree themselves.
            spent, key = sum(map(int, fields[11:13])) / TICKS, (pid, fields[19])
            more = spent - self._seen.get(key, 0.0)
            self._seen[key] = spent
            self.processor[self._step] = self.processor.get(self._step, 0.0) + more


def copy_example(folder: Path, *, cases: int | None, rows: int | None) -> None:
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".graft", "*.html"))
    file = folder / "graft.yaml"
    text = file.read_text()
    for name, number in (("max_cases", cases), ("max_rows", rows)):
        if number is not None:
            text = re.sub(rf"{name}: \d+", f"{name}: {number}", text)
    file.write_text(text)


def describe_steps(status: dict[str, Any], processor: dict[str, float]) -> dict[str, dict[str, Any]]:
    found = {}
    for step in status["steps"]:
        timed = step.get("time")
        if timed is None:
            continue
        planned = timed["planned"]["value"]
        found[step["step"]] = {
            "seconds": round(timed["seconds"], 2),
            "planned": round(planned, 2),
            "off": round(timed["seconds"] / planned - 1, 3),
            "processor_seconds": round(processor.get(step["step"], 0.0), 1),
            "planned_parts": {name: round(part, 2) for name, part in timed["planned_parts"].items()},
            "parts": {name: round(part, 2) for name, part in timed["parts"].items()},
        }
    return found


def measure(folder: Path, *, show: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    find_base(EMBEDDED, project_folder=folder)
    ready, load = time.perf_counter() - begun, os.getloadavg()[0]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
    run = subprocess.Popen(
        [*GRAFT, "run", "--json", "--project", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    output: list[str] = []
    assert run.stdout is not None
    collecting = threading.Thread(target=lambda out: output.append(out.read()), args=(run.stdout,))
    collecting.start()
    clock = StepClock(run, show=show)
    seconds = clock.follow()
    collecting.join()
    made = json.loads("".join(output)) if "".join(output).strip() else {}
    asked = subprocess.run(
        [*GRAFT, "status", "--json", "--project", str(folder)], capture_output=True, text=True, check=True
    )
    steps = describe_steps(json.loads(asked.stdout), clock.processor)
    planned = sum(step["planned"] for step in steps.values())
    return {
        "wall_seconds": round(seconds, 1),
        "to_release_seconds": round(clock.begun["try"], 1) if "try" in clock.begun else None,
        "in_steps_seconds": round(sum(step["seconds"] for step in steps.values()), 1),
        "planned_seconds": round(planned, 1),
        "off": round(sum(step["seconds"] for step in steps.values()) / planned - 1, 3) if planned else None,
        "processor_seconds": round(sum(clock.processor.values()), 1),
        "base_ready_seconds": round(ready, 1),
        "load_average_before": round(load, 2),
        "exit_code": run.returncode,
        "verdict": made.get("gate", {}).get("decision"),
        **({"error": made["what"]} if "what" in made else {}),
        "adapter": made.get("train", {}).get("adapter_hash", "")[:12],
        "device": made.get("plan", {}).get("device"),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument(
        "--folder", type=Path, help="keep the project here; default: a folder that is removed"
    )
    parser.add_argument("--show", action="store_true", help="print what the run prints")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graft-demo-") as scratch:
        folder = asked.folder or Path(scratch) / "demo"
        copy_example(folder, cases=asked.cases, rows=asked.rows)
        figures = measure(folder, show=asked.show)
    print(json.dumps(figures), flush=True)
    if asked.save:
        here = name_device()
        save_results(f"demo_{here.kind}", figures, device=here.name)
    if figures["verdict"] is None:
        sys.exit(f"the run did not come to a verdict: {figures.get('error', 'see --show')}")


if __name__ == "__main__":
    main()
