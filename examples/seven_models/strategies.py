"""Which order of training is better, and does a federation help? Measured on `examples/seven_models`.

Run: python examples/seven_models/strategies.py --folder FOLDER [--seeds 2] [--unit 9]. Started again in the
same FOLDER, it goes on where it was. Every strategy gets the same number of optimizer steps in all
(7 × unit), of the same batch size, rank and learning rate, and is measured on the same held-out cases: each
case is answered by the adapter that the strategy has for its role. Measures: the mean loss of a case, and the
share of replies that greedy decoding gives exactly (it does where every token is the most probable one after
those before it).

The engine, the loop, the merge and the proximal term are those of `graft train`. One process trains all runs,
so that the frozen layers read each row once; a federation's places are sets of rows here, not machines.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from graftwork.api.project import open_project
from graftwork.data.project import PreparedData
from graftwork.files.dataset import read_rows
from graftwork.files.disk import Journal, write_atomic
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import make_trainable, save_trained, trained_tensors
from graftwork.model.base import loadable_name
from graftwork.model.load import load_base
from graftwork.model.threads import use_threads
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject
from graftwork.records.dataset import Row
from graftwork.registry.export import MergeRequest, merge_adapters
from graftwork.train.cpu.step import CpuStep, MemoryCache
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.loss import TokenBatch, token_losses
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import ALL_LINEARS, TrainSettings

EXAMPLE = Path(__file__).parent
ROLES = ("federation", "continuation", "resources", "learning", "interface", "arbitration")
PLACES = {"a": ROLES[:2], "b": ROLES[2:4], "c": ROLES[4:]}
ROUNDS = 3
UPPER = 2
"""Layers that learn, from the top."""
FOCUS = 0.5
"""Share of a specialist's rows that are its own, where it sees the whole corpus."""
PULL = 0.1
"""Strength of the proximal term."""
CASES_PER_ROLE = 8
ROWS_PER_ROLE = 24
"""Training rows of a role: few, as when a specialist begins."""
LONGEST_REPLY = 32
"""Tokens. Short replies keep the steps cheap: these rows are decisions, not code."""
RESAMPLES = 4000
Adapters = Mapping[str, Path]
"""The adapter that answers the cases of a role."""


class Bench:
    """One base in memory; runs one after the other, each finished one kept in a folder."""

    def __init__(self, work: OpenProject, root: Path, *, batch_size: int, rate: float, threads: int) -> None:
        use_threads(threads)
        self.work, self.root, self._batch_size, self._rate = work, root, batch_size, rate
        prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
        self.train_rows = _by_role(read_rows(Path(prepared.folder), "train"), ROWS_PER_ROLE)
        self.cases = _by_role(read_rows(Path(prepared.folder), "test"), CASES_PER_ROLE)
        model = load_base(Path(work.weights.folder))
        layers = model.config.num_hidden_layers
        self.shape = AdapterShape(
            rank=8, alpha=16, targets=ALL_LINEARS, layers=tuple(range(layers - UPPER, layers))
        )
        self._parameters = make_trainable(model, self.shape, seed=0)
        every = [row for rows in (*self.train_rows.values(), *self.cases.values()) for row in rows]
        step = CpuStep(model, layers - UPPER, every, states=MemoryCache(), packed=True)
        self._model, self._logits = model, step.logits
        self._tensors = trained_tensors(model)

    def train(
        self, name: str, rows: Sequence[Row], *, seed: int, start: Path | None = None, pull: float = 0.0
    ) -> Path:
        """Train a run unless it is there; its adapter folder."""
        folder = self.root / "runs" / name
        adapter = folder / "adapter"
        if adapter.exists():
            return adapter
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._take(start, seed=seed)
        settings = TrainSettings(
            epochs=1,
            batch_size=self._batch_size,
            learning_rate=self._rate,
            seed=seed,
            checkpoint_every=10**6,
            proximal=pull,
        )
        engine = TrainingEngine(
            self._model, self._parameters, settings=settings, step=StepOptions(logits=self._logits)
        )
        TrainingLoop(engine, EpochOrder(rows, settings=settings), RunContext(settings, folder)).run()
        save_trained(self._model, adapter, shape=self.shape, base=loadable_name(self.work.base.name))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return adapter

    def merge(self, name: str, parents: Sequence[Path]) -> Path:
        """The mean of what the parents change, weighted by the tokens that each was trained on."""
        to = self.root / "merged" / name
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            tokens = [_trained_tokens(parent) for parent in parents]
            weights = ",".join(repr(count / sum(tokens)) for count in tokens)
            names = tuple(f"adapter:{parent}" for parent in parents)
            merge_adapters(self.work, MergeRequest(names, to, weights=weights, shape=self.shape))
        return to

    @torch.no_grad()
    def measure(self, adapter: Path | None, roles: Sequence[str]) -> list[dict[str, Any]]:
        """Every held-out case of these roles with its loss, and whether greedy decoding gives its reply."""
        self._take(adapter, seed=0)
        found = []
        for role in roles:
            for row in self.cases[role]:
                batch = TokenBatch([row], device="cpu")
                logits = self._logits(batch)
                losses = token_losses(logits, batch.targets)
                exact = bool((logits.argmax(dim=-1) == batch.targets).all())
                found.append({"case": row.id, "role": role, "loss": float(losses.mean()), "exact": exact})
        return found

    @torch.no_grad()
    def _take(self, adapter: Path | None, *, seed: int) -> None:
        """The weights of a folder; or fresh ones, which change nothing yet."""
        given = load_file(adapter / "adapter_model.safetensors") if adapter is not None else {}
        chance = torch.Generator().manual_seed(seed)
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            if given:
                tensor.copy_(given[name])
            elif "lora_B" in name:
                tensor.zero_()
            else:
                bound = 1 / math.sqrt(tensor.shape[1])
                tensor.copy_((torch.rand(tensor.shape, generator=chance) * 2 - 1) * bound)


def _by_role(rows: Sequence[Row], most: int) -> dict[str, list[Row]]:
    short = [row for row in rows if len(row.tokens) - row.trained_from <= LONGEST_REPLY]
    return {role: [row for row in short if row.group == role][:most] for role in ROLES}


def _trained_tokens(adapter: Path) -> int:
    return sum(step.trained_tokens for step in read_steps(adapter.parent))


class Draw:
    """Rows for the steps of a run. The same name and seed give the same rows."""

    def __init__(self, bench: Bench, *, seed: int, batch_size: int) -> None:
        self._rows, self._seed, self._batch_size = bench.train_rows, seed, batch_size

    def of(self, roles: Sequence[str], steps: int, *, name: str) -> list[Row]:
        """Rows of these roles alike; each is drawn again only when all were."""
        return self._take([row for role in roles for row in self._rows[role]], steps * self._batch_size, name)

    def focused(self, role: str, steps: int, *, name: str) -> list[Row]:
        """Its own rows, and others of the corpus."""
        count = steps * self._batch_size
        own = round(count * FOCUS)
        others = [row for other in ROLES if other != role for row in self._rows[other]]
        rows = [*self._take(self._rows[role], own, name), *self._take(others, count - own, f"{name}/others")]
        random.Random(f"{self._seed}/{name}/order").shuffle(rows)
        return rows

    def _take(self, pool: Sequence[Row], count: int, name: str) -> list[Row]:
        chance = random.Random(f"{self._seed}/{name}")
        taken: list[Row] = []
        while len(taken) < count:
            taken += chance.sample(pool, min(len(pool), count - len(taken)))
        return taken


def strategies(bench: Bench, draw: Draw, *, seed: int, unit: int) -> dict[str, Callable[[], Adapters]]:
    """By name: trains what is missing, and gives the adapter of every role."""
    total = 7 * unit

    def run(name: str, rows: list[Row], start: Path | None = None, pull: float = 0.0) -> Path:
        return bench.train(f"{seed}/{name}", rows, seed=seed, start=start, pull=pull)

    def main_model(steps: int, name: str, start: Path | None = None) -> Path:
        return run(name, draw.of(ROLES, steps, name=name), start)

    def specialists(
        steps: int, prefix: str, *, start: Path | None = None, isolated: bool = False
    ) -> dict[str, Path]:
        return {
            role: run(
                f"{prefix}-{role}",
                draw.of((role,), steps, name=f"{prefix}/{role}")
                if isolated
                else draw.focused(role, steps, name=f"{prefix}/{role}"),
                start,
            )
            for role in ROLES
        }

    def one_model() -> Adapters:
        adapter = main_model(total, "one")
        return dict.fromkeys(ROLES, adapter)

    def parallel(isolated: bool) -> Adapters:
        # The main model's steps count: it is one of the seven. Its adapter answers no case of a role.
        main_model(unit, "main")
        return specialists(unit, "isolated" if isolated else "focused", isolated=isolated)

    def sequential(isolated: bool) -> Adapters:
        start = main_model(unit, "main")
        return specialists(
            unit, f"after-main-{'isolated' if isolated else 'focused'}", start=start, isolated=isolated
        )

    def iterative() -> Adapters:
        # Half of the steps, then all seven become one, then the other half from there.
        first = unit // 2
        main = main_model(first, "iterative-main-1")
        parts = specialists(first, "iterative-1", start=main)
        together = bench.merge(f"{seed}-iterative", [main, *parts.values()])
        main_model(unit - first, "iterative-main-2", together)
        return specialists(unit - first, "iterative-2", start=together)

    def federated(kind: str, places: Mapping[str, Sequence[Row]], pull: float = 0.0) -> Adapters:
        steps = total // (len(places) * ROUNDS)
        start: Path | None = None
        for number in range(1, ROUNDS + 1):
            parts = [
                run(f"{kind}-{number}-{place}", _turn(rows, number, steps * bench_rows), start, pull)
                for place, rows in places.items()
            ]
            start = bench.merge(f"{seed}-{kind}-{number}", parts)
        assert start is not None
        return dict.fromkeys(ROLES, start)

    bench_rows = draw._batch_size
    by_role = {
        place: draw.of(roles, total // len(PLACES), name=f"place-{place}") for place, roles in PLACES.items()
    }
    mixed = {place: draw.of(ROLES, total // len(PLACES), name=f"mixed-{place}") for place in PLACES}

    def single(place: str) -> Adapters:
        adapter = run(f"only-{place}", draw.of(PLACES[place], total, name=f"only-{place}"))
        return dict.fromkeys(ROLES, adapter)

    return {
        "one model, all data": one_model,
        "parallel, focus": lambda: parallel(False),
        "main first, focus": lambda: sequential(False),
        "iterative, focus": iterative,
        "parallel, isolated": lambda: parallel(True),
        "federated by role": lambda: federated("fedavg", by_role),
        **{f"place {place} alone": lambda place=place: single(place) for place in PLACES},
        "federated, mixed": lambda: federated("fedmixed", mixed),
        "federated by role, proximal": lambda: federated("fedprox", by_role, PULL),
        "main first, isolated": lambda: sequential(True),
    }


def _turn(rows: Sequence[Row], number: int, count: int) -> list[Row]:
    """The rows of one round: the next ones of the place."""
    return list(rows[(number - 1) * count : number * count])


def interval(values: Sequence[float], *, seed: int = 0) -> dict[str, float]:
    """The mean with 95 % by bootstrap over cases."""
    data = np.asarray(values)
    chance = np.random.default_rng(seed)
    means = data[chance.integers(0, len(data), (RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": round(float(data.mean()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def summarize(found: Mapping[str, Mapping[int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Means over cases; a case's value is its mean over the seeds. Differences are paired by case."""
    base = {case["case"]: case for case in found["base"][0]}
    table: dict[str, Any] = {}
    against = _values(found["one model, all data"]) if "one model, all data" in found else {}
    for name, seeds in found.items():
        loss, exact = _values(seeds), _values(seeds, "exact")
        keys = sorted(loss)
        entry: dict[str, Any] = {"seeds": len(seeds), "cases": len(keys)}
        entry["loss"] = interval([loss[key] for key in keys])
        entry["exact_replies"] = interval([exact[key] for key in keys])
        entry["loss_by_role"] = {
            role: interval([loss[key] for key in keys if base[key]["role"] == role]) for role in ROLES
        }
        entry["minus_base"] = interval([loss[key] - base[key]["loss"] for key in keys])
        if against:
            entry["minus_one_model"] = interval([loss[key] - against[key] for key in keys])
        entry["by_seed"] = {
            str(seed): round(float(np.mean([case["loss"] for case in cases])), 4)
            for seed, cases in seeds.items()
        }
        # The gate: on no role worse than the base, by the upper end of the interval.
        worse = [
            role
            for role in ROLES
            if interval([loss[key] - base[key]["loss"] for key in keys if base[key]["role"] == role])["high"]
            >= 0
        ]
        entry["passes_on_every_role"] = not worse
        table[name] = entry
    return table


def pairs(found: Mapping[str, Mapping[int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The differences that the questions are about: less than 0 where the first is better."""
    questions = (
        ("main first, focus", "parallel, focus"),
        ("iterative, focus", "parallel, focus"),
        ("iterative, focus", "main first, focus"),
        ("parallel, focus", "parallel, isolated"),
        ("main first, focus", "main first, isolated"),
        ("federated by role", "one model, all data"),
        ("federated, mixed", "one model, all data"),
        ("federated by role, proximal", "federated by role"),
        *(("federated by role", f"place {place} alone") for place in PLACES),
    )
    made = {}
    for one, other in questions:
        if one in found and other in found:
            seeds = found[one].keys() & found[other].keys()
            first, second = (_values({seed: found[name][seed] for seed in seeds}) for name in (one, other))
            made[f"{one} − {other}"] = interval([first[key] - second[key] for key in sorted(first)])
    return made


def _values(seeds: Mapping[int, list[dict[str, Any]]], key: str = "loss") -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for cases in seeds.values():
        for case in cases:
            gathered.setdefault(case["case"], []).append(float(case[key]))
    return {case: sum(values) / len(values) for case, values in gathered.items()}


def prepare_folder(root: Path) -> Path:
    """The example without curriculum and reinforcement learning, so that steps are counted exactly."""
    project = root / "project"
    if not (project / "graft.yaml").exists():
        shutil.copytree(EXAMPLE / "logs", project / "logs", dirs_exist_ok=True)
        settings = yaml.safe_load((EXAMPLE / "graft.yaml").read_text())
        kept = {key: settings[key] for key in ("project", "base", "data", "evaluate", "gate")}
        write_atomic(project / "graft.yaml", yaml.safe_dump(kept, sort_keys=False))
    return project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--unit", type=int, default=9, help="steps of one of seven models; a multiple of 9")
    parser.add_argument("--batch-rows", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--only", nargs="*", help="names of strategies")
    asked = parser.parse_args()
    if asked.unit % 9:
        raise SystemExit("--unit must be a multiple of 9, so that all strategies have the same steps")
    root = asked.folder / f"unit-{asked.unit}-batch-{asked.batch_size}-rate-{asked.learning_rate:g}"
    root.mkdir(parents=True, exist_ok=True)
    journal = Journal(root / "measured.jsonl")
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for line in journal.read():
        found.setdefault(line["strategy"], {})[line["seed"]] = line["cases"]
    with open_project(prepare_folder(asked.folder)).open() as work:
        bench = Bench(
            work, root, batch_size=asked.batch_size, rate=asked.learning_rate, threads=asked.threads
        )
        _measure(bench, journal, found, "base", 0, dict.fromkeys(ROLES))
        for seed in range(asked.seeds):
            draw = Draw(bench, seed=seed, batch_size=asked.batch_size)
            for name, make in strategies(bench, draw, seed=seed, unit=asked.unit).items():
                if asked.only and name not in asked.only:
                    continue
                if seed in found.get(name, {}):
                    continue
                begun, used = time.perf_counter(), time.process_time()
                _measure(bench, journal, found, name, seed, make())
                seconds, cpu = time.perf_counter() - begun, time.process_time() - used
                loss = np.mean([case["loss"] for case in found[name][seed]])
                print(f"{name}, seed {seed}: loss {loss:.4f}, {seconds:.0f} s, {cpu:.0f} s CPU", flush=True)
                _save(found, asked, bench)


def _measure(
    bench: Bench,
    journal: Journal,
    found: dict[str, dict[int, list[dict[str, Any]]]],
    name: str,
    seed: int,
    adapters: Mapping[str, Path | None],
) -> None:
    if seed in found.get(name, {}):
        return
    groups: dict[Path | None, list[str]] = {}
    for role, adapter in adapters.items():
        groups.setdefault(adapter, []).append(role)
    cases = [case for adapter, roles in groups.items() for case in bench.measure(adapter, roles)]
    journal.append({"strategy": name, "seed": seed, "cases": cases}, durable=True)
    found.setdefault(name, {})[seed] = cases


def _save(found: Mapping[str, Any], asked: argparse.Namespace, bench: Bench) -> None:
    figures = {
        "steps_in_all": 7 * asked.unit,
        "batch_size": asked.batch_size,
        "learning_rate": asked.learning_rate,
        "rounds": ROUNDS,
        "proximal": PULL,
        "focus": FOCUS,
        "training_rows": {role: len(rows) for role, rows in bench.train_rows.items()},
        "strategies": summarize(found),
        "differences": pairs(found),
    }
    path = asked.folder / "strategies.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    print(path, flush=True)


if __name__ == "__main__":
    main()
