"""What 1 % more rows cost, stage by stage, in processor time without the start of the command.

Prepares generated logs, appends one row in a hundred and prepares again, in this process and its workers.
What grows with the old rows is in the stages between reading and rendering; reading and rendering are the new
rows, the last block if it was not full, and the first use of libraries. With `--check` the grown log is also
prepared from nothing: the hashes must be equal. `--folder` goes on from a log that already exists.

    python benchmarks/data_growth.py --rows 50000 --check
"""

import argparse
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from data_scale import make_rows, write_log

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.prepare import PrepareJob, prepare
from graftwork.data.settings import DataSettings
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.process.pieces import MapEngine


def used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


class StageClock:
    """Processor time of this process and of its children, by the stage that was reported last."""

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.workers: dict[str, float] = {}
        self._stage = "start"
        self._last = (used(resource.RUSAGE_SELF), used(resource.RUSAGE_CHILDREN))

    def __call__(self, stage: str, _done: int, _total: int) -> None:
        now = (used(resource.RUSAGE_SELF), used(resource.RUSAGE_CHILDREN))
        self.own[self._stage] = self.own.get(self._stage, 0.0) + now[0] - self._last[0]
        # Counted when workers have ended, which is after the stage that they belong to.
        self.workers[self._stage] = self.workers.get(self._stage, 0.0) + now[1] - self._last[1]
        self._stage, self._last = stage, now


def prepare_once(root: Path, template: ChatTemplate, engine: MapEngine, name: str, clock: Any = None) -> str:
    settings = DataSettings(logs=("log.jsonl",), max_tokens=1024)
    job = PrepareJob(
        AuditContext(settings=settings),
        base="base",
        base_fingerprint="f",
        renderer=template,
        work=root / name / "work",
        out=root / name / "out",
        root=root,
    )
    job.work.mkdir(parents=True, exist_ok=True)
    return prepare(job, on_progress=clock, engine=engine).datasets[0].dataset.content_hash


def measure(root: Path, template: ChatTemplate, name: str) -> tuple[str, float]:
    clock = StageClock()
    found = prepare_once(root, template, MapEngine(processes=2), "work", clock)
    clock("end", 0, 0)
    taken = {stage: clock.own[stage] + clock.workers[stage] for stage in clock.own}
    stages = "  ".join(f"{stage} {seconds:.2f}" for stage, seconds in taken.items())
    print(f"{name:<8}{sum(taken.values()):8.2f} s cpu   {stages}", flush=True)
    return found, sum(taken.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graft-growth-") as folder:
        root = given.folder or Path(folder)
        log = root / "log.jsonl"
        if not log.exists():
            write_log(log, make_rows(given.rows, seed=1), mode="wb")
        template = ChatTemplate.from_folder(Path(find_base(EMBEDDED, project_folder=Path("/")).folder))
        _, whole = measure(root, template, "whole")
        write_log(log, make_rows(max(given.rows // 100, 1), seed=2), mode="ab")
        grown, more = measure(root, template, "grown")
        print(f"1 % more rows: {more / whole:.1%} of the processor time")
        if given.check:
            shutil.rmtree(root / "work")
            fresh, _ = measure(root, template, "fresh")
            print("the same dataset" if fresh == grown else "ANOTHER dataset")
            sys.exit(fresh != grown)


if __name__ == "__main__":
    main()
