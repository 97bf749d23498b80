"""Measures what the tests notice: seeded mutants of the code that decides, against the tests that cover them.

    python tests/mutants/run.py --journal before.jsonl                     # stop and start again at any time
    python tests/mutants/run.py --journal after.jsonl --like before.jsonl  # the same mutants, other tests
    python tests/mutants/run.py --journal before.jsonl --report

In: this checkout, a seed. Out: a journal with one line per mutant, a table by area, the survivors. Mutants
live in a copy of the checkout, in --cache; the map from lines to tests is made there once per state of both.
"""

import argparse
import compileall
import ctypes
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from draw import KEY, Mutant, draw, find_mutants, match

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/graftwork"
AREAS = {
    "gate": ("evaluate/gate",),
    "statistics": ("evaluate/statistics",),
    "registry": ("registry", "store/releases.py"),
    "fleet": ("fleet/control.py", "store/fleet.py"),
    "cycle": ("cycle/state.py", "cycle/decide.py", "store/cycles.py"),
    "split and mask": ("data/split", "data/render/rows.py"),
    "checkpoints": ("train/checkpoints.py",),
    "sandbox": ("process/sandbox",),
    "gateway limits": ("serve/keys.py", "serve/budgets.py", "store/api_keys.py"),
    "objectives": ("train/objectives", "train/loss.py"),
}
TESTS = (
    *(f"unit/{part}" for part in ("cycle", "evaluate", "registry", "fleet", "store")),
    *(
        f"unit/data/test_data_{part}.py"
        for part in ("split", "split_state", "leak", "model_subsets", "overlong")
    ),
    *(f"unit/train/test_train_{part}.py" for part in ("checkpoint", "checkpoint_policy", "objectives")),
    *(f"unit/train/test_train_{part}.py" for part in ("objective_gradients", "preferences", "proximal")),
    *("unit/serve/test_serve_keys.py", "unit/serve/test_serve_gateway.py", "hostile/test_sandbox.py"),
    *(f"contract/test_{part}.py" for part in ("store_fleet", "store_api_keys", "mirror", "release_index")),
    *("contract/test_minisign.py", "unit/train/test_merge_adapters.py", "unit/grading"),
    *("unit/components/test_verifier.py", "flow/test_cycle_flow.py"),
    *("unit/process", "golden", "unit/data", "statistics", "unit/train", "unit/serve", "unit/pipeline"),
    *(f"flow/test_{part}_flow.py" for part in ("gate", "release")),
)
"""What the map is made from, in this order, as long as its time suffices."""
SANDBOX_TESTS = ("process/test_sandbox", "grading/test_metrics", "grading/test_grading", "components/")
IN_CHILDREN = {
    f"{PACKAGE}/process/sandbox/inside/": (
        "tests/hostile/test_sandbox",
        *(f"tests/unit/{tests}" for tests in SANDBOX_TESTS),
    )
}
"""Code that runs in processes of its own, where no line is recorded, and the tests that start them."""
MAP_TIMEOUT = 60
"""Seconds; a test that takes longer is not in the map."""
PR_SET_CHILD_SUBREAPER = 36


class Tree:
    """A copy of the checkout. Each mutant is tried in a child of this process, which has done the imports."""

    def __init__(self, cache: Path) -> None:
        self.root, self._cache = cache / "tree", cache
        tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines())
        for path in self.root.rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and str(path.relative_to(self.root)) not in tracked:
                path.unlink()
        for name in tracked:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        os.chdir(self.root)
        sys.path[:0] = [str(self.root / "src"), str(self.root / "tests")]
        os.environ["PYTHONPATH"] = sys.path[0]
        compileall.compile_dir("src", quiet=1)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        import preloaded

        preloaded._import_all(["pytest", "hypothesis", "coverage", *preloaded.PRELOADED])

    def try_mutant(self, mutant: Mutant, tests: list[str], limit: float) -> tuple[str, str]:
        """killed, survived or timeout; the test that failed."""
        path, failure = self.root / mutant.file, self._cache / "failure"
        source, stat = path.read_bytes(), path.stat()
        failure.write_text("")
        path.write_bytes(mutant.apply(source))
        try:
            code = self._in_child(lambda: self._pytest(tests, _FirstFailure(failure), "-x"), limit)
        finally:
            path.write_bytes(source)
            os.utime(path, (stat.st_atime, stat.st_mtime))
        return "timeout" if code is None else "killed" if code else "survived", failure.read_text()

    def map_lines(self, limit: float) -> dict:
        """The tests that run each line, and the seconds of each test that passes."""
        digest = hashlib.sha256(repr(AREAS).encode())
        for path in sorted(self.root.rglob("*.py")):
            digest.update(path.read_bytes())
        stored, part = self._cache / f"map-{digest.hexdigest()[:12]}.json", self._cache / "part.json"
        lines_map = (
            json.loads(stored.read_text()) if stored.exists() else {"done": [], "seconds": {}, "lines": {}}
        )
        deadline = time.monotonic() + limit
        for tests in TESTS:
            left = deadline - time.monotonic()
            if tests in lines_map["done"] or left <= 0:
                continue
            part.write_text('{"seconds": {}, "lines": {}}')
            self._in_child(
                lambda tests=tests, left=left: self._record(f"tests/{tests}", left, part), left + 90
            )
            recorded = json.loads(part.read_text())
            lines_map["done"].append(tests)
            lines_map["seconds"] |= recorded["seconds"]
            for line, names in recorded["lines"].items():
                lines_map["lines"][line] = sorted({*lines_map["lines"].get(line, ()), *names})
            stored.write_text(json.dumps(lines_map))
            print(
                f"map: {tests}, {len(recorded['seconds'])} tests, {deadline - time.monotonic():.0f} s left",
                flush=True,
            )
        return lines_map

    def _record(self, tests: str, limit: float, out: Path) -> int:
        import coverage

        files = [str(path) for path in list_files(self.root)]
        recording = coverage.Coverage(data_file=None, include=files, config_file=False)
        recorder = _Recorder(recording, time.monotonic() + limit)
        recording.start()
        code = self._pytest([tests], recorder, f"--timeout={MAP_TIMEOUT}")
        recording.stop()
        data, lines = recording.get_data(), {}
        for file in data.measured_files():
            for line, names in data.contexts_by_lineno(file).items():
                lines[f"{Path(file).relative_to(self.root)}:{line}"] = [
                    n for n in names if n in recorder.passed
                ]
        out.write_text(json.dumps({"seconds": recorder.passed, "lines": lines}))
        return code

    def _pytest(self, tests: list[str], plugin: object, *options: str) -> int:
        import pytest

        fixed = ["-q", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={self._cache / 'tmp'}"]
        return int(pytest.main([*fixed, *options, *tests], plugins=[plugin]))

    def _in_child(self, work, limit: float) -> int | None:
        """The exit code; None where the limit passed. Nothing that the child started goes on."""
        pid = os.fork()
        if pid == 0:
            _do_and_exit(work, self._cache / "child.log")
        deadline, status = time.monotonic() + limit, None
        while status is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, value = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(value) if ended else None
        while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return status


def _do_and_exit(work, log: Path) -> None:
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(file, number)
        code = work()
    finally:
        os._exit(code)


class _Recorder:
    """Records lines under the name of the test that runs, and the seconds of those that pass."""

    def __init__(self, recording, stop_at: float) -> None:
        self._recording, self._stop_at = recording, stop_at
        self._started = 0.0
        self.passed: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid):
        self._recording.switch_context(nodeid)
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report):
        if report.passed and (report.when == "setup" or report.nodeid in self.passed):
            self.passed[report.nodeid] = round(time.monotonic() - self._started, 3)
        else:
            self.passed.pop(report.nodeid, None)

    def pytest_runtest_logfinish(self, nodeid):
        self._recording.switch_context("")

    def pytest_runtest_setup(self, item):
        if time.monotonic() > self._stop_at:
            item.session.shouldstop = "the time for the map is over"


class _FirstFailure:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report):
        if report.failed and not self._file.read_text():
            self._file.write_text(report.nodeid)


def list_files(tree: Path, area: str | None = None) -> list[Path]:
    places = AREAS[area] if area else itertools.chain.from_iterable(AREAS.values())
    paths = [tree / PACKAGE / place for place in places]
    return [path for place in paths for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


def covering_tests(mutant: Mutant, lines_map: dict, limit: float) -> tuple[list[str], int]:
    """The cheapest tests that run the mutant, as many as the limit allows; how many are left out."""
    lines, seconds = lines_map["lines"], lines_map["seconds"]
    tests = {name for line in mutant.lines for name in lines.get(f"{mutant.file}:{line}", ())}
    if not tests and not mutant.lines:  # It runs during the import.
        tests = {
            name for line, names in lines.items() if line.startswith(f"{mutant.file}:") for name in names
        }
    for folder, beginnings in IN_CHILDREN.items():
        if not tests and mutant.file.startswith(folder):
            tests = {name for name in seconds if name.startswith(beginnings)}
    cheapest = sorted(tests, key=lambda name: (seconds[name], name))
    sums = itertools.accumulate(seconds[name] for name in cheapest)
    count = max(sum(spent <= limit for spent in sums), 1)
    return cheapest[:count], len(cheapest[count:])


def report(entries: list[dict], gone: int) -> str:
    columns = ("killed", "timeout", "survived", "not covered")
    lines = [f"{'area':16}{'mutants':>9}" + "".join(f"{column:>13}" for column in columns)]
    for area in (*AREAS, "all"):
        results = Counter(entry["result"] for entry in entries if area in (entry["area"], "all"))
        lines.append(f"{area:16}{results.total():9}" + "".join(f"{results[column]:13}" for column in columns))
    lines += [f"gone from the source: {gone}", ""]
    for entry in entries:
        if entry["result"] in columns[2:]:
            tests = f"{entry['tests']} tests, {entry['left_out']} left out"
            lines.append(f"{entry['result']}: {entry['file']}:{entry['line']} {entry['name']} ({tests})")
            lines.append(f"    {entry['operator']}: {entry['change']}")
    return "\n".join(lines)


def read_journal(path: Path) -> dict[tuple, dict]:
    """By the key of the mutant; a later line takes the place of an earlier one."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {tuple(entry[field] for field in KEY): entry for entry in entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--journal", type=Path, required=True, help="where the results go, one line per mutant"
    )
    parser.add_argument("--like", type=Path, help="try the mutants of this journal")
    parser.add_argument("--report", action="store_true", help="only print the table of the journal")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--limit", type=float, default=60, help="most seconds of a mutant")
    parser.add_argument("--map-seconds", type=float, default=900, help="most seconds of the map")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "graftwork-mutants")
    options = parser.parse_args()
    journal, gone = options.journal.resolve(), []
    areas = {
        area: [
            mutant
            for path in list_files(ROOT, area)
            for mutant in find_mutants(area, path.relative_to(ROOT).as_posix(), path.read_text())
        ]
        for area in AREAS
    }
    mutants = draw(areas, seed=options.seed, count=options.count)
    if options.like:
        mutants, gone = match(
            list(read_journal(options.like).values()), list(itertools.chain.from_iterable(areas.values()))
        )
    if not options.report:
        run(mutants, journal, Tree(options.cache.resolve()), options)
    print(report(list(read_journal(journal).values()), len(gone)))


def run(mutants: list[Mutant], journal: Path, tree: Tree, options: argparse.Namespace) -> None:
    lines_map = tree.map_lines(options.map_seconds)
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    tried = read_journal(journal)
    for mutant in mutants:
        started, before = time.monotonic(), tried.get(mutant.key)
        tests, left_out = covering_tests(mutant, lines_map, options.limit / 3)
        # Again only where it lives and more tests cover it now, or a larger limit lets them run.
        if before and (before["result"] in {"killed", "timeout"} or len(tests) <= before["tests"]):
            continue
        result, failed = tree.try_mutant(mutant, tests, options.limit) if tests else ("not covered", "")
        unchanged = mutant._replace(span=(0, 0), replacement="")
        while failed in tests and tree.try_mutant(unchanged, [failed], options.limit)[1]:
            tests.remove(failed)  # It fails without the mutation too.
            result, failed = tree.try_mutant(mutant, tests, options.limit) if tests else ("not covered", "")
        if result == "timeout" and tree.try_mutant(unchanged, tests, options.limit)[0] == "timeout":
            result, tests = "not covered", []  # They are too slow here.
        entry = dict(zip(Mutant._fields[:8], mutant, strict=False))
        entry |= {"result": result, "failed": failed, "tests": len(tests), "left_out": left_out}
        entry["seconds"] = round(time.monotonic() - started, 1)
        with journal.open("a") as out:
            out.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
