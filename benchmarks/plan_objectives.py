"""Plans of DPO and GRPO on a processor against the runs that they plan: memory and seconds a step.

Run: python benchmarks/plan_objectives.py [--cases 1 2] [--steps 6] [--threads 1] [--save]. Each run is
`graft train` on a project of its own with SmolLM2. Memory is the peak of the training process, which other
work on the machine does not change. Seconds are the clock's, and the processor's of the whole process tree:
with one thread these are about what the clock would show on a quiet machine. A plan of GRPO guesses the
length of answers; `at_length` is the plan with the length that the run had. Saved runs of other cases are
kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from process_tree import TreeMonitor
from results import save_results

STORY = "The keeper of the old lighthouse wrote down every ship that passed the rocks that year. "
REWARD = "import random\n\n\ndef draw(case, text):\n    return random.random()\n"
"""By chance, so that no group is dead: the plan assumes that every answer is trained on."""
BASE = "smollm2-135m-instruct"
RESULTS = Path(__file__).parent / "results" / "plan_objectives.json"


@dataclass(frozen=True)
class Case:
    """A run to plan and to take."""

    objective: str
    rows: int
    """Pairs of a step, or prompts of a step."""
    repeats: int
    """Sentences of a prompt."""
    train: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.objective} {self.rows} × {self.repeats}"


CASES = (
    Case("sft", 8, 4, {"batch_rows": 8}),
    Case("dpo", 4, 4, {"batch_rows": 4}),
    Case("grpo", 2, 6, {"rollouts": {"prompts": 2, "answers": 8, "max_tokens": 32}}),
    Case("dpo", 8, 8, {"batch_rows": 8}),
    Case("grpo", 4, 12, {"rollouts": {"prompts": 4, "answers": 8, "max_tokens": 48}}),
    Case("dpo", 5, 6, {"batch_rows": 5}),
    Case("grpo", 3, 4, {"rollouts": {"prompts": 3, "answers": 6, "max_tokens": 24}}),
    Case("grpo", 1, 9, {"rollouts": {"prompts": 1, "answers": 12, "max_tokens": 40}}),
    Case("dpo", 2, 12, {"batch_rows": 2}),
)
"""Supervised training is the control: what it is off by, the others are off by for the same reasons. The
constants of the model come from the first three; the others are there to confirm them."""
FITTED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of cases, from 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--replan", action="store_true", help="plan the saved runs again, after a change of the model"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/plan_objectives.json")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    if asked.replan:
        replan()
        return
    chosen = CASES if asked.cases is None else [CASES[number] for number in asked.cases]
    for case in chosen:
        found = measure(case, steps=asked.steps, threads=asked.threads)
        print(json.dumps(found), flush=True)
        if asked.save:
            save_results("plan_objectives", {"runs": [*other_runs(found), found]})


def replan() -> None:
    """What the saved runs took, against plans by the model as it is now."""
    runs = [planned_again(run) for run in json.loads(RESULTS.read_text())["figures"]["runs"]]
    for run in runs:
        shown = ("case", "memory_error", "time_error", "time_error_at_length")
        print(json.dumps({key: run[key] for key in shown}))
    save_results("plan_objectives", {"runs": runs})


def planned_again(run: dict[str, Any]) -> dict[str, Any]:
    case = next(case for case in CASES if case.name == run["case"])
    steps, threads, rate = run["steps"], run["threads"], run["gflops"]
    plan = make_plan(case, steps, threads, rate)
    length = run["measures"].get("length")
    known = plan if length is None else make_plan(case, steps, threads, rate, length=length)
    return run | compare(plan, known, peak=run["peak_gib"], spent=run["processor_seconds"])


def compare(plan: Any, known: Any, *, peak: float, spent: float) -> dict[str, Any]:
    """The planned figures, and how far they are off. `known` is the plan with the length of the answers."""
    planned, at_length = seconds_a_step(plan), seconds_a_step(known)
    parts = {
        kind: {
            name.partition(".")[2]: round(figure.value, 3)
            for name, figure in plan.parts.items()
            if name.startswith(f"{kind}.")
        }
        for kind in ("peak_memory_gib", "minutes")
    }
    return {
        "planned_gib": round(plan.peak_memory_gib.value, 3),
        "memory_error": round(plan.peak_memory_gib.value / peak - 1, 3),
        "planned_seconds": round(planned, 2),
        "time_error": round(planned / spent - 1, 3),
        "seconds_at_length": round(at_length, 2),
        "time_error_at_length": round(at_length / spent - 1, 3),
        "planned_parts_gib": parts["peak_memory_gib"],
        "planned_minutes": parts["minutes"],
    }


def other_runs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The saved runs of other cases, or with other threads."""
    if not RESULTS.is_file():
        return []
    kept = json.loads(RESULTS.read_text())["figures"]["runs"]
    return [run for run in kept if any(run.get(key) != found[key] for key in ("case", "threads"))]


def measure(case: Case, *, steps: int, threads: int) -> dict[str, Any]:
    rate = measure_quiet_rate(threads)
    plan = make_plan(case, steps, threads, rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_project(folder, case, steps=steps, threads=threads)
        monitor = train(folder)
        run = next((folder / ".graft" / "runs").iterdir())
        outcome = json.loads((run / "outcome.json").read_text())
        taken = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    spent = [
        after - before for before, after in zip(monitor.cpu_at_step, monitor.cpu_at_step[1:], strict=False)
    ]
    lengths = [step["measures"]["length"] for step in taken[1:] if "length" in step["measures"]]
    known = make_plan(case, steps, threads, rate, length=mean(lengths)) if lengths else plan
    peak = outcome["peak_memory_gib"]
    return {
        "case": case.name,
        "threads": threads,
        "fitted": case in CASES[:FITTED],
        "steps": len(taken),
        "peak_gib": round(peak, 3),
        "seconds": round(median(step["seconds"] for step in taken[1:]), 2),
        "processor_seconds": round(median(spent), 2),
        **compare(plan, known, peak=peak, spent=median(spent)),
        "measures": {
            key: round(value, 2)
            for key, value in taken[-1]["measures"].items()
            if key in ("length", "rollout_seconds", "grading_seconds")
        },
        "gflops": rate,
        "load_average": round(os.getloadavg()[0], 1),
    }


def seconds_a_step(plan: Any) -> float:
    parts = [plan.parts.get(f"minutes.{name}") for name in ("compute", "rollouts")]
    minutes = sum(figure.value for figure in parts if figure is not None)
    return float(60 * minutes / plan.steps.value)


def make_plan(case: Case, steps: int, threads: int, rate: float, *, length: float | None = None) -> Any:
    """`graft plan` on the project, at this matrix rate; with answers of this length where it is known."""
    from graftwork import open_project
    from graftwork.costmodel.rollouts import USUAL_LENGTH

    share = USUAL_LENGTH if length is None else length / case.train["rollouts"]["max_tokens"]
    with (
        tempfile.TemporaryDirectory() as name,
        patch("graftwork.model.probe._probe", lambda _threads: {"gflops": rate}),
        patch("graftwork.pipeline.rewards.USUAL_LENGTH", share),
    ):
        write_project(Path(name), case, steps=steps, threads=threads)
        return open_project(Path(name)).plan()


def measure_quiet_rate(threads: int) -> float:
    """The plan's own measurement by processor time instead of the clock: that of a quiet machine."""
    import torch

    torch.set_num_threads(threads)
    x, w = torch.randn(1024, 576), torch.randn(1536, 576)
    rates = []
    for _ in range(40):
        begun = time.process_time()
        for _ in range(4):
            torch.nn.functional.linear(x, w)
        rates.append(threads * 4 * 2 * 1024 * 576 * 1536 / (time.process_time() - begun) / 1e9)
    return median(rates)


def write_project(folder: Path, case: Case, *, steps: int, threads: int) -> None:
    # From half to one and a half times as long: rows of one length would leave the heap without gaps.
    lengths = [case.repeats // 2 + at % (case.repeats + 1) for at in range(case.rows * steps)]
    prompts = [f"Number {at}. Go on with this story. {STORY * length}" for at, length in enumerate(lengths)]
    settings: dict[str, Any] = {
        "project": "plan",
        "base": BASE,
        "data": {"logs": ["log.jsonl"], "test": 0, "validation": 0, "near_duplicate": 1.0},
        "train": {"objective": case.objective, "rank": 16, "epochs": 1, "threads": threads, **case.train},
        "gate": {"primary": "none"},
    }
    if case.objective == "grpo":
        (folder / "own.py").write_text(REWARD)
        lines = [{"id": str(at), "prompt": text, "reference": "none"} for at, text in enumerate(prompts)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings["train"]["rollouts"] |= {"source": "prompts.jsonl", "steps": steps, "truncated": "grade"}
        settings["train"] |= {
            "epochs": 3,
            "rewards": [{"metric": "own.py:draw"}],
            "reward_checks": {"hacks": False, "canaries": 0, "preflight": False},
        }
    rows = [
        {"prompt": text, "chosen": f"{STORY}{at}", "rejected": f"{at}{STORY[: 40 + at]}"}
        for at, text in enumerate(prompts)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # JSON is YAML.
    (folder / "graft.yaml").write_text(json.dumps(settings))


def train(folder: Path) -> TreeMonitor:
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "-C", str(folder)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        with TreeMonitor(process.pid, folder / ".graft/runs/*/steps.jsonl") as monitor:
            code = process.wait()
        output.seek(0)
        if code:
            raise SystemExit(f"graft train ended with {code}:\n{output.read()[-3000:]}")
    return monitor


if __name__ == "__main__":
    main()
