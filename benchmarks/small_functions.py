"""Whether reinforcement learning adds to supervised training of the same duration: examples/small_functions.

Run: python benchmarks/small_functions.py [--seeds 1 2 3] [--cases held_out.jsonl] [--save]. For each seed,
`taught` is trained as graft.yaml says, `rewarded` goes on from it, and `taught` is trained once more with as
many epochs as take the processor time of both (on a card: the time of the clock). Then all adapters and the
base answer the cases, greedily and `--samples` times by chance. `--taught` and `--rewarded` change settings,
as JSON. p is McNemar's, exact, over the pairs of all seeds; the clustered p flips the signs of all seeds of a
case together. What was trained stays in `--work`, and a second call goes on from there.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from process_tree import TreeMonitor
from results import save_results

EXAMPLE = Path(__file__).parents[1] / "examples" / "small_functions"
FLIPS = 20_000
MAX_TOKENS = 40
GREEDY_ROWS, SAMPLED_PROMPTS = 64, 16
"""Answered together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cases", default="held_out.jsonl", help="file of the example")
    parser.add_argument("--samples", type=int, default=4, help="answers by chance to each case")
    parser.add_argument("--taught", type=json.loads, default={}, help="settings of supervised training")
    parser.add_argument("--rewarded", type=json.loads, default={}, help="settings of GRPO")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--work", type=Path, help="folder for what is trained")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/small_functions*.json")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        answer_cases(json.loads(asked.measure.read_text()), asked.measure.with_suffix(".out"))
        return
    work = asked.work or Path(tempfile.mkdtemp(prefix="small-functions-"))
    work.mkdir(parents=True, exist_ok=True)
    arms: dict[str, list[dict[str, Any]]] = {"base": []}
    for seed in asked.seeds:
        for name, arm in train_arms(work, seed, asked).items():
            arms.setdefault(name, []).append(arm)
    adapters = {arm["adapter"] for found in arms.values() for arm in found}
    answered = measure(work, ["base", *sorted(adapters)], asked)
    arms["base"] = [{"seed": seed, "adapter": "base", "seconds": 0.0} for seed in asked.seeds]
    figures = summarize(arms, answered)
    print(json.dumps({key: value for key, value in figures.items() if key != "solved"}, indent=2))
    if asked.save:
        (work / "answered.json").write_text(json.dumps(answered))
        save_results(f"small_functions_{asked.device}", figures)


def train_arms(work: Path, seed: int, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The three arms of a seed; the last is as long as the first two together."""
    short = train(work / f"seed{seed}", "taught", seed, asked)
    rewarded = train(work / f"seed{seed}", "rewarded", seed, asked)
    whole = short["seconds"] + rewarded["seconds"]
    epochs = short["epochs"] + (whole - short["seconds"]) / short["epoch_seconds"]
    changed = argparse.Namespace(**{**vars(asked), "taught": {**asked.taught, "epochs": round(epochs)}})
    longer = train(work / f"seed{seed}-longer", "taught", seed, changed)
    return {
        "supervised": short,
        "supervised, then GRPO": {**rewarded, "seconds": whole},
        "supervised, as long": longer,
    }


def train(folder: Path, model: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """`graft train` of one model; what it took is kept next to it."""
    kept = folder / f"{model}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    if not folder.exists():
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".graft", "__pycache__", "*.html"))
        write_settings(folder / "graft.yaml", seed, asked)
    before = {run.name for run in folder.glob(".graft/runs/*")}
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "--model", model, "-C", str(folder)]
    begun = time.time()
    with (folder / f"{model}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        with TreeMonitor(process.pid, folder / ".graft/runs/*/none") as monitor:
            code = process.wait()
    if code:
        raise SystemExit(
            f"{model} of seed {seed} ended with {code}: {(folder / f'{model}.log').read_text()[-2000:]}"
        )
    (run,) = (run for run in folder.glob(".graft/runs/*") if run.name not in before)
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    clock = asked.device == "cuda"
    seconds = time.time() - begun if clock else monitor.cpu_seconds
    outcome = json.loads((run / "outcome.json").read_text())
    share = sum(step["seconds"] for step in steps) / (time.time() - begun)
    found = {
        "seed": seed,
        "adapter": str(run / "adapter"),
        "seconds": round(seconds, 1),
        "epochs": outcome["epochs"],
        "epoch_seconds": seconds * share / max(outcome["epochs"], 1),
        "measures": {
            name: [round(step["measures"].get(name, 0.0), 3) for step in steps]
            for name in ("pass@1", "pass@k", "audit")
            if name in steps[0]["measures"]
        },
    }
    print(json.dumps({"model": model, **found}), file=sys.stderr, flush=True)
    kept.write_text(json.dumps(found))
    return found


def write_settings(path: Path, seed: int, asked: argparse.Namespace) -> None:
    import yaml

    settings = yaml.safe_load(path.read_text())
    settings["train"] |= {"seed": seed, **asked.taught}
    own = settings["models"]["rewarded"]["train"]
    for name, value in asked.rewarded.items():
        own[name] = {**own.get(name, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def measure(work: Path, adapters: list[str], asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Verdicts by adapter and case: of the greedy answer, then of the others. In a process of its own."""
    question = {"cases": asked.cases, "samples": asked.samples, "adapters": adapters, "device": asked.device}
    path = work / "measure.json"
    path.write_text(json.dumps(question))
    subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)
    return dict(json.loads(path.with_suffix(".out").read_text()))


def answer_cases(question: dict[str, Any], out: Path) -> None:
    import torch

    from graftwork.evaluate.cases import read_case_file
    from graftwork.grading.reward_runner import RewardQuestion, RewardRunner
    from graftwork.grading.rewards import RewardPart, RewardSpec
    from graftwork.model.adapters.peft import load_adapter
    from graftwork.model.base import EMBEDDED, find_base
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.load import load_base

    if os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cases = {case.id: case for case in read_case_file(EXAMPLE / question["cases"])}
    base = Path(find_base(EMBEDDED, project_folder=EXAMPLE).folder)
    template = ChatTemplate.from_folder(base)
    prompts = {name: template.prompt(case.messages) for name, case in cases.items()}
    spec = RewardSpec(parts=(RewardPart(metric="task_success"),), folder=str(EXAMPLE))
    answered: dict[str, dict[str, list[float]]] = {}
    with RewardRunner(spec) as runner:
        for adapter in question["adapters"]:
            model = load_base(base, dtype="float32", device=question["device"])
            if adapter != "base":
                load_adapter(model, Path(adapter))
            texts = write_answers(model, template, prompts, samples=question["samples"])
            asked = [
                RewardQuestion(f"{name}#{at}", cases[name], text)
                for name, found in texts.items()
                for at, text in enumerate(found)
            ]
            graded = iter([found.reward or 0.0 for found in runner.grade_all(asked)])
            answered[adapter] = {name: [next(graded) for _ in found] for name, found in texts.items()}
            solved = fmean(grades[0] for grades in answered[adapter].values())
            print(f"{solved:.1%} greedy: {adapter}", file=sys.stderr, flush=True)
    out.write_text(json.dumps(answered))


def write_answers(
    model: Any, template: Any, prompts: dict[str, list[int]], *, samples: int
) -> dict[str, list[str]]:
    """For each prompt the greedy answer, then those by chance."""
    from graftwork.model.generate.generator import Generator, Sampling
    from graftwork.model.load import eval_mode
    from graftwork.train.objective_settings import RolloutSettings
    from graftwork.train.rollouts.sampling import AskedPrompt, RolloutSampler

    names = list(prompts)
    found: dict[str, list[str]] = {}
    with eval_mode(model):
        generator = Generator(model, stop_tokens=[template.eos])
        for at in range(0, len(names), GREEDY_ROWS):
            some = names[at : at + GREEDY_ROWS]
            replies = generator.generate(
                [prompts[name] for name in some], Sampling(max_new_tokens=MAX_TOKENS, temperature=0.0)
            )
            found |= {
                name: [template.decode(reply.tokens)] for name, reply in zip(some, replies, strict=True)
            }
    if samples < 2:
        return found
    settings = RolloutSettings(max_tokens=MAX_TOKENS, answers=samples, prompts=SAMPLED_PROMPTS)
    sampler = RolloutSampler(
        model, settings=settings, seed=0, end_of_turn=template.eos, decode=template.decode
    )
    for at in range(0, len(names), SAMPLED_PROMPTS):
        asked = [AskedPrompt(name, prompts[name]) for name in names[at : at + SAMPLED_PROMPTS]]
        for answer in sampler.sample(1, asked):
            found[answer.prompt].append(answer.text)
    return found


def summarize(
    arms: dict[str, list[dict[str, Any]]], answered: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    cases = list(answered["base"])
    solved = {
        name: [{case: answered[arm["adapter"]][case][0] for case in cases} for arm in found]
        for name, found in arms.items()
    }
    return {
        "cases": len(cases),
        "arms": {
            name: {
                "seconds": [arm["seconds"] for arm in found],
                "solved": [int(sum(one.values())) for one in solved[name]],
                "greedy": round(fmean(fmean(one.values()) for one in solved[name]), 4),
                **sampled_rates([answered[arm["adapter"]] for arm in found]),
            }
            for name, found in arms.items()
        },
        "compared": [
            compare(first, second, solved)
            for first, second in (
                ("base", "supervised, then GRPO"),
                ("supervised", "supervised, then GRPO"),
                ("supervised, as long", "supervised, then GRPO"),
            )
        ],
        "learned": {
            name: [arm["measures"] for arm in found if arm.get("measures")] for name, found in arms.items()
        },
        "solved": solved,
    }


def sampled_rates(answers: list[dict[str, list[float]]]) -> dict[str, float]:
    """pass@1 and pass@k of the answers by chance, as means over seeds."""
    by_case = [grades[1:] for found in answers for grades in found.values()]
    if not by_case or not by_case[0]:
        return {}
    return {
        "pass@1": round(fmean(map(fmean, by_case)), 4),
        f"pass@{len(by_case[0])}": round(fmean(float(any(grades)) for grades in by_case), 4),
    }


def compare(first: str, second: str, solved: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    pairs = list(zip(solved[first], solved[second], strict=True))
    changes = {case: [after[case] - before[case] for before, after in pairs] for case in pairs[0][0]}
    gained = sum(change > 0 for found in changes.values() for change in found)
    lost = sum(change < 0 for found in changes.values() for change in found)
    return {
        "from": first,
        "to": second,
        "gained": gained,
        "lost": lost,
        "points": round(100 * (gained - lost) / (len(changes) * len(pairs)), 2),
        "points_by_seed": [
            round(100 * fmean(found[at] for found in changes.values()), 2) for at in range(len(pairs))
        ],
        "p": round(mcnemar(gained, lost), 4),
        "p_clustered": round(flip_signs([sum(found) for found in changes.values()]), 4),
    }


def mcnemar(gained: int, lost: int) -> float:
    """Exact, two-sided."""
    count = gained + lost
    tail = sum(comb(count, at) for at in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def flip_signs(changes: list[float], *, flips: int = FLIPS) -> float:
    """Two-sided: how often sums with random signs are as far from 0."""
    chance = random.Random(0)
    moved = [change for change in changes if change]
    observed = abs(sum(moved))
    reached = sum(
        abs(sum(change if chance.random() < 0.5 else -change for change in moved)) >= observed - 1e-9
        for _ in range(flips)
    )
    return (reached + 1) / (flips + 1)


if __name__ == "__main__":
    main()
