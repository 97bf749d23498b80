"""How the time of `data prepare` divides, what a cluster can gain by Amdahl, and what Ray nodes do gain.

Prepares generated logs with all cores of this machine, counts the processor time of this process (which
cannot be divided) and of its workers (which can) by stage, and prints the ceiling. With `--ray N` the same
logs are then prepared in turn by N Ray nodes of one core each and by one process with N workers; the hashes
of the datasets must be equal. Medians of wall time are compared, and the processor time of all processes,
Ray's own among them; on a busy machine read the latter. `--save` writes benchmarks/results/data_engines.json.

    python benchmarks/data_engines.py [--rows 20000]
    PYTHONPATH=$PWD/.ray python benchmarks/data_engines.py --rows 200000 --ray 2 --rounds 3 --save

`--folder` keeps the logs and the datasets there, and goes on from logs that are there already.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

from data_scale import list_family, make_rows, write_log
from results import save_results

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.prepare import PrepareJob, RenderTarget, prepare
from graftwork.data.settings import DataSettings
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.process.cluster.engine import MapEngine


def used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def used_by_all() -> float:
    """Processor time of this process, of all that descend from it, and of those that have ended."""
    ticks = 0
    for pid in list_family(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


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
        base=RenderTarget("base", "f", template),
        work=root / name / "work",
        out=root / name / "out",
        root=root,
    )
    job.work.mkdir(parents=True, exist_ok=True)
    return prepare(job, on_progress=clock, engine=engine).datasets[0].dataset.content_hash


def divide(root: Path, template: ChatTemplate, rows: int) -> tuple[str, dict[str, Any]]:
    clock = StageClock()
    began = time.perf_counter()
    found = prepare_once(root, template, MapEngine(processes=2), "local-0", clock)
    clock("end", 0, 0)
    wall = time.perf_counter() - began
    whole = sum(clock.own.values()) + sum(clock.workers.values())
    print(
        f"{rows:,} rows: {whole:.1f} s of processor time, {wall:.1f} s on 2 cores, "
        f"load {os.getloadavg()[0]:.0f}"
    )
    print(f"{'stage':<20}{'this process':>14}{'workers':>10}")
    for stage in clock.own:
        print(f"{stage:<20}{clock.own[stage]:>12.1f} s{clock.workers[stage]:>8.1f} s")
    share = sum(clock.workers.values()) / whole
    print(f"divisible: {share:.1%}; ceiling by Amdahl: {1 / (1 - share):.1f} x one core")
    for cores in (2, 4, 8, 16, 32):
        print(f"  {cores:>3} cores: {1 / (1 - share + share / cores):5.1f} x", flush=True)
    stages = {
        stage: {"this_process": round(clock.own[stage], 1), "workers": round(clock.workers[stage], 1)}
        for stage in clock.own
    }
    return found, {
        "rows": rows,
        "seconds": round(wall, 1),
        "cpu_seconds": round(whole, 1),
        "stages": stages,
        "divisible": round(share, 4),
        "amdahl_ceiling": round(1 / (1 - share), 1),
    }


def compare(
    root: Path, template: ChatTemplate, *, nodes: int, rounds: int, first: dict[str, Any], expected: str
) -> dict[str, Any]:
    """`first` is what one process with two workers took already; more rounds take turns."""
    from ray_cluster import running_ray

    from graftwork.process.cluster.ray_tasks import RayTasks, ray_environment

    (root / "ray").mkdir()
    times: dict[str, list[float]] = {"ray": [], "local": [first["seconds"]]}
    cpu: dict[str, list[float]] = {"ray": [], "local": [first["cpu_seconds"]]}
    with running_ray(root / "ray", nodes=nodes) as cluster:
        runner = RayTasks(cluster.address, ray_environment(token=str(root / "ray" / "token")))
        for number in range(rounds):
            for name, taken in times.items():
                if len(taken) == rounds:
                    continue
                engine = MapEngine(
                    runner if name == "ray" else None, folder=root / "engine", processes=nodes, say=print
                )
                began, before = time.perf_counter(), used_by_all()
                found = prepare_once(root, template, engine, f"{name}-{number + (name == 'local')}")
                taken.append(time.perf_counter() - began)
                cpu[name].append(used_by_all() - before)
                print(
                    f"{name:<8}{taken[-1]:8.1f} s  {cpu[name][-1]:8.1f} s cpu  load {os.getloadavg()[0]:.0f}",
                    flush=True,
                )
                if found != expected:
                    sys.exit(f"{name} made another dataset: {found[:12]}, not {expected[:12]}")
    ratios = {
        kind: statistics.median(local / ray for local, ray in zip(of["local"], of["ray"], strict=True))
        for kind, of in (("time", times), ("cpu", cpu))
    }
    print(
        f"{nodes} Ray nodes of one core: {ratios['time']:.2f} x the speed of one process with {nodes} workers"
        f", by processor time {ratios['cpu']:.2f} x"
    )
    rounded = {name: [round(value, 1) for value in values] for name, values in times.items()}
    rounded_cpu = {name: [round(value, 1) for value in values] for name, values in cpu.items()}
    return {
        "nodes": nodes,
        "seconds": rounded,
        "cpu_seconds": rounded_cpu,
        "speed_by_time": round(ratios["time"], 3),
        "speed_by_cpu": round(ratios["cpu"], 3),
        "same_hash": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--ray", type=int, default=0, help="nodes of one core each; 0: only the division")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graft-engines-") as name:
        root = given.folder or Path(name)
        if not (root / "log.jsonl").exists():
            write_log(root / "log.jsonl", make_rows(given.rows, seed=1), mode="wb")
        template = ChatTemplate.from_folder(Path(find_base(EMBEDDED, project_folder=Path("/")).folder))
        expected, figures = divide(root, template, given.rows)
        if given.ray:
            figures["ray"] = compare(
                root, template, nodes=given.ray, rounds=given.rounds, first=figures, expected=expected
            )
        if given.save:
            save_results("data_engines", figures)


if __name__ == "__main__":
    main()
