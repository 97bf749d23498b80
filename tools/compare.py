"""Compares an old commit with this checkout: the bytes they make of the examples, and the CPU time they take.

    python tools/compare.py OLD [--examples cited_answers,seven_models] [--full]
    python tools/compare.py OLD --speed [--pairs 7] [--stages prepare,train]

Both checkouts run the examples of the old commit with the same interpreter, through their command line only,
because their module names differ. The results of the old commit are cached in `.compare/`. Exit code 1: the
bytes differ, or a stage is slower than the limit; 2: a stage failed.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("cited_answers", "seven_models")
SMALLER: dict[str, dict[str, Any]] = {
    "cited_answers": {
        "train": {
            "max_rows": 16,
            "checkpoint_every": 2,
            "validation_rows": 8,
            "run": {"rehearse_crash": False},
        }
    },
    "seven_models": {"train": {"max_rows": 8, "batch_size": 4}},
}
"""Settings of the examples for a comparison in minutes on two cores; `--full` leaves them as they are."""
QUICK = {
    "train": {"max_rows": 16, "epochs": 1, "validation_rows": 4, "run": {"rehearse_crash": False}},
    "evaluate": {"max_cases": 6, "max_new_tokens": 8, "latency_cases": 6},
    "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
}
"""Settings for `--speed`: two steps, six short answers, and a gate that lets the release pass."""
STAGES: dict[str, tuple[int, list[str]]] = {
    "help": (5, ["--help"]),
    "plan fit": (
        3,
        ["plan", "fit", "--model", "qwen2.5-7b", "--method", "qlora", "--gpu", "RTX 4090", "--json"],
    ),
    "audit": (1, ["data", "audit", "--json"]),
    "prepare": (1, ["data", "prepare", "--json"]),
    "plan": (1, ["plan", "--json"]),
    "train": (1, ["train", "--json"]),
    "evaluate": (1, ["eval", "--json"]),
    "gate": (1, ["gate", "--json"]),
    "release": (1, ["release", "make", "--json"]),
    "status": (3, ["status", "--json"]),
}
"""Name -> how often a pair runs it, and its arguments. Those from prepare on need the ones before them."""
ALONE = {"help", "plan fit", "audit"}
PASSING_CODES = {"audit": (0, 1), "plan fit": (0, 1)}
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors")
UNSEEDED = "random/"
"""Tensors of a checkpoint that hold the state of random generators, which a run does not seed or use."""
LIMIT = 1.05
CONFIDENCE = 0.95
SET_SUBREAPER, GET_SUBREAPER = 36, 37

Snapshot = dict[str, dict[str, str]]
"""What was made -> name of a file or tensor -> its SHA-256."""


class StageFailure(Exception):
    """A command of a checkout ended with a code that is not its answer."""


@dataclass(frozen=True)
class Checkout:
    """A source tree and the way into its command line."""

    name: str
    folder: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        scripts = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]["scripts"]
        module, function = scripts["graft"].split(":")
        code = f"import sys; from {module} import {function} as main; sys.argv[0] = 'graft'; sys.exit(main())"
        return [sys.executable, "-c", code, *arguments]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAFT_")}
        if "GRAFT_CACHE" in os.environ:
            kept["GRAFT_CACHE"] = os.environ["GRAFT_CACHE"]
        return {**kept, "PYTHONPATH": str(self.folder / "src"), "PYTHONHASHSEED": "0", "COLUMNS": "100"}

    def run(self, arguments: Sequence[str], *, cwd: Path, passing: Sequence[int] = (0,)) -> float:
        """Runs `graft ARGUMENTS`; the CPU seconds (user and system) of the process and its descendants."""
        before = os.times()
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                self.command(arguments),
                cwd=cwd,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if _adopts_orphans():
                _wait_for_children()
            if done.returncode not in passing:
                output.seek(0)
                said = output.read().decode(errors="replace")[-3000:]
                raise StageFailure(
                    f"{self.name}: graft {' '.join(arguments)} ended with {done.returncode}:\n{said}"
                )
        after = os.times()
        return (after.children_user - before.children_user) + (after.children_system - before.children_system)


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends, so that their time is counted too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_SUBREAPER, 1, 0, 0, 0)


def _adopts_orphans() -> bool:
    adopts = ctypes.c_int(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(GET_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    return bool(adopts.value)


def _wait_for_children() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


@contextmanager
def check_out(commit: str) -> Iterator[Checkout]:
    """The files of a commit in a temporary folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="graft-compare-") as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Checkout("old", Path(folder))


def resolve_commit(name: str) -> str:
    command = ["git", "rev-parse", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def copy_project(example: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy of an example without its state, with some settings changed."""
    shutil.copytree(example, target, ignore=shutil.ignore_patterns(".graft", "*.html", "__pycache__"))
    path = target / "graft.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(merge_settings(settings, changes), sort_keys=False))
    return target


def merge_settings(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in changes.items():
        both_nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge_settings(merged[name], value) if both_nested else value
    return merged


def take_snapshot(project: Path) -> Snapshot:
    """The digests of everything that must not change: datasets, packs, adapters and checkpoints by model."""
    state = project / ".graft"
    snapshot: Snapshot = {}
    models: dict[str, str] = {}
    for path in sorted(state.glob("datasets/*/manifest.json")):
        model, folder = json.loads(path.read_text())["model"], path.parent
        models[folder.name] = model
        snapshot[f"{model}: dataset id"] = {"id": folder.name}
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                kind = {"packs.parquet": "packs", "drops.parquet": "drops", "manifest.json": "manifest"}
                snapshot.setdefault(f"{model}: {kind.get(name, 'row shards')}", {})[name] = hash_file(file)
    for path in sorted(state.glob("runs/*/adapter/adapter_model.safetensors")):
        run = path.parent.parent
        job = (run / "job.json").read_text()
        model = next((model for dataset, model in models.items() if dataset in job), f"run {run.name}")
        snapshot[f"{model}: adapter tensors"] = hash_tensors(path)
        snapshot[f"{model}: adapter config"] = {
            "adapter_config.json": hash_file(path.parent / "adapter_config.json")
        }
        checkpoints = sorted(run.glob("checkpoints/*/tensors.safetensors"))
        for checkpoint in checkpoints[-1:]:
            snapshot[f"{model}: checkpoint tensors"] = hash_tensors(checkpoint)
    return snapshot


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensors(path: Path) -> dict[str, str]:
    """Name -> digest of dtype, shape and bytes; the order of the file does not matter."""
    digests = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name == "__metadata__" or name.startswith(UNSEEDED):
                continue
            start, end = tensor["data_offsets"]
            file.seek(8 + length + start)
            digest = hashlib.sha256(f"{tensor['dtype']} {tensor['shape']} ".encode())
            digest.update(file.read(end - start))
            digests[name] = digest.hexdigest()
    return digests


def make_snapshot(checkout: Checkout, example: Path, changes: dict[str, Any]) -> Snapshot:
    """Prepares, plans and trains a copy of the example with this checkout."""
    with tempfile.TemporaryDirectory(prefix="graft-compare-") as folder:
        project = copy_project(example, Path(folder) / example.name, changes)
        has_models = "models" in yaml.safe_load((project / "graft.yaml").read_text())
        for arguments in (["data", "prepare"], ["plan"], ["train", *(["--all"] if has_models else [])]):
            seconds = checkout.run([*arguments, "--json"], cwd=project)
            print(
                f"  {checkout.name}: {example.name}: {' '.join(arguments)}: {seconds:.0f} s", file=sys.stderr
            )
        return take_snapshot(project)


@dataclass(frozen=True)
class Difference:
    """A file or tensor that is not the same in both snapshots."""

    item: str
    name: str
    problem: str


def find_differences(old: Snapshot, new: Snapshot) -> list[Difference]:
    found = []
    for item in sorted({*old, *new}):
        before, after = old.get(item, {}), new.get(item, {})
        for name in sorted({*before, *after}):
            if name not in after:
                found.append(Difference(item, name, "only the old commit makes it"))
            elif name not in before:
                found.append(Difference(item, name, "only the new checkout makes it"))
            elif before[name] != after[name]:
                problem = f"{before[name][:12]} became {after[name][:12]}"
                found.append(Difference(item, name, problem))
    return found


def print_snapshots(example: str, old: Snapshot, new: Snapshot) -> None:
    different = {difference.item for difference in find_differences(old, new)}
    print(f"{example:36} {'count':>6}  {'old':12}  {'new':12}")
    for item in sorted({*old, *new}):
        digests = [_combine(snapshot.get(item, {})) for snapshot in (old, new)]
        verdict = "DIFFERS" if item in different else "equal"
        print(f"  {item:34} {len(old.get(item, {})):6}  {digests[0]:12}  {digests[1]:12}  {verdict}")


def _combine(digests: dict[str, str]) -> str:
    if len(digests) == 1:
        return next(iter(digests.values()))[:12]
    return (
        hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12] if digests else "none"
    )


def describe_machine() -> dict[str, str]:
    """What the bytes may depend on besides the code."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    cores = str(os.cpu_count())
    return {
        "cpu": model or platform.processor(),
        "cores": cores,
        "python": platform.python_version(),
        **versions,
    }


def read_or_make(cache: Path, checkout: Checkout, example: Path, changes: dict[str, Any]) -> Snapshot:
    """The snapshot of the old commit, from the cache if this machine made it with these settings."""
    described = json.dumps([changes, describe_machine()], sort_keys=True)
    path = cache / f"{example.name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"
    if path.exists():
        print(f"  old: {example.name}: from {path}", file=sys.stderr)
        snapshot: Snapshot = json.loads(path.read_text())
        return snapshot
    snapshot = make_snapshot(checkout, example, changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(snapshot, indent=1, sort_keys=True))
    partial.replace(path)
    return snapshot


def compare_bytes(old: Checkout, new: Checkout, *, cache: Path, examples: Sequence[str], full: bool) -> int:
    failed = False
    for name in examples:
        example = old.folder / "examples" / name
        changes = {} if full else SMALLER[name]
        before = read_or_make(cache, old, example, changes)
        after = make_snapshot(new, example, changes)
        print_snapshots(name, before, after)
        differences = find_differences(before, after)
        for difference in differences[:20]:
            print(f"DIFFERS  {name}: {difference.item}: {difference.name}: {difference.problem}")
        if len(differences) > 20:
            print(f"         and {len(differences) - 20} more")
        failed = failed or bool(differences) or not before
    print("different" if failed else "equal: every row shard, pack, manifest, adapter and checkpoint tensor")
    return int(failed)


def bound_median(ratios: Sequence[float]) -> float:
    """The upper bound of the median ratio: exact Wilcoxon signed-rank, one-sided, on logarithms.

    It is the largest mean of two ratios (Walsh average) that the data do not exclude; infinite below five
    pairs, where no bound exists at this confidence.
    """
    count = len(ratios)
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        ways = [longer[i] + (ways[i - rank] if i >= rank else 0) for i in range(len(longer))]
    excluded, total = 0, 0
    for number in ways:
        total += number
        if total / 2**count > 1 - CONFIDENCE:
            break
        excluded += 1
    if not excluded:
        return math.inf
    logs = [math.log(ratio) for ratio in ratios]
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(count) for j in range(i, count))
    return math.exp(averages[-excluded])


def time_stages(
    order: Sequence[Checkout], example: Path, stages: Sequence[str]
) -> dict[str, dict[str, float]]:
    """CPU seconds of each stage in a fresh copy of the example for each checkout.

    The checkouts take turns command by command, so that a load which changes within minutes slows down both.
    """
    seconds: dict[str, dict[str, float]] = {checkout.name: {} for checkout in order}
    last = max((list(STAGES).index(name) for name in stages if name not in ALONE), default=-1)
    with tempfile.TemporaryDirectory(prefix="graft-compare-") as folder:
        projects = {
            checkout.name: copy_project(example, Path(folder) / checkout.name / example.name, QUICK)
            for checkout in order
        }
        for position, (name, (times, arguments)) in enumerate(STAGES.items()):
            if name not in stages and (name in ALONE or position > last):
                continue
            passing = PASSING_CODES.get(name, (0,))
            for _ in range(times if name in stages else 1):
                for checkout in order:
                    spent = checkout.run(arguments, cwd=projects[checkout.name], passing=passing)
                    if name in stages:
                        seconds[checkout.name][name] = seconds[checkout.name].get(name, 0.0) + spent
    return seconds


def compare_speed(old: Checkout, new: Checkout, *, pairs: int, stages: Sequence[str], limit: float) -> int:
    for checkout in (old, new):
        command = [sys.executable, "-m", "compileall", "-q", str(checkout.folder / "src")]
        subprocess.run(command, check=True)
    example = old.folder / "examples" / "cited_answers"
    measured: list[dict[str, dict[str, float]]] = []
    for number in range(pairs):
        order = (old, new) if number % 2 == 0 else (new, old)
        measured.append(time_stages(order, example, stages))
        ratios = {name: measured[-1]["new"][name] / measured[-1]["old"][name] for name in measured[-1]["old"]}
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        print(f"  pair {number + 1} of {pairs}: {shown}", file=sys.stderr)
    return print_speed(measured, limit=limit)


def print_speed(measured: Sequence[dict[str, dict[str, float]]], *, limit: float) -> int:
    """The table of CPU seconds; 1 where the upper bound of a stage's median ratio is above the limit."""
    slower = []
    print(f"{'stage':10} {'old s':>8} {'new s':>8} {'ratio':>7} {'upper':>7}")
    for name in measured[0]["old"]:
        ratios = [pair["new"][name] / pair["old"][name] for pair in measured]
        upper = bound_median(ratios)
        medians = [median(pair[side][name] for pair in measured) for side in ("old", "new")]
        verdict = "" if upper <= limit else "  ABOVE THE LIMIT"
        print(f"{name:10} {medians[0]:8.2f} {medians[1]:8.2f} {median(ratios):7.3f} {upper:7.3f}{verdict}")
        if verdict:
            slower.append(name)
    print(f"{len(measured)} pairs; limit of the upper bound {limit}; above it: {', '.join(slower) or 'none'}")
    return int(bool(slower))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="commit to compare with")
    parser.add_argument("--examples", default=",".join(EXAMPLES), help="examples to run, comma separated")
    parser.add_argument("--full", action="store_true", help="run the examples as they are, not shortened")
    parser.add_argument("--cache", type=Path, default=ROOT / ".compare", help="folder of the old results")
    parser.add_argument("--speed", action="store_true", help="compare CPU time instead of bytes")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs for --speed")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages for --speed, comma separated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="highest allowed upper bound of the ratio")
    arguments = parser.parse_args()
    for name, known in (("examples", EXAMPLES), ("stages", STAGES)):
        chosen = getattr(arguments, name).split(",")
        setattr(arguments, name, chosen)
        if unknown := [item for item in chosen if item not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} is not one of {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = _read_arguments()
    _adopt_orphans()
    commit = resolve_commit(arguments.old)
    new = Checkout("new", ROOT)
    try:
        with check_out(commit) as old:
            if arguments.speed:
                return compare_speed(
                    old, new, pairs=arguments.pairs, stages=arguments.stages, limit=arguments.limit
                )
            cache = arguments.cache / commit[:12]
            return compare_bytes(old, new, cache=cache, examples=arguments.examples, full=arguments.full)
    except StageFailure as failure:
        print(failure, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
