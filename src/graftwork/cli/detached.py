"""`--detach`: plan in the terminal, where mistakes are seen; train in a process that outlives it."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.project.load import Project

POLL_SECONDS = 0.2


def start_detached(verb: str, *, project: Path | None, model: str | None, as_json: bool) -> None:
    """Start `graft VERB` in the background; say which run it is and how to follow it."""
    from graftwork.cli.steps import run_upto
    from graftwork.pipeline.lineage import run_id_of
    from graftwork.process.worker import lock_holder, start_detached
    from graftwork.project.load import open_project
    from graftwork.records.plan import Plan

    opened = open_project(project)
    holder = lock_holder(opened.state / "pipeline")
    if holder is not None:
        _say(as_json, state="already running", run=_current_run(opened), pid=holder, log=None)
        return
    run_id = run_id_of(run_upto("plan", project=opened.root, model=model).get("plan", Plan))
    log = opened.state / "logs" / f"{run_id}.log"
    words = [sys.executable, "-m", "graftwork.cli.main", verb, "-C", str(opened.root)]
    words += ["--model", model] if model else []
    child = start_detached(words, log=log, folder=opened.root)
    if _took_hold(child, opened) or child.returncode == 0:
        state = "started" if child.returncode is None else "nothing left to do"
        _say(as_json, state=state, run=run_id, pid=child.pid, log=log)
        return
    raise _failed_at_once(child.returncode, log)


def _took_hold(child: "subprocess.Popen[bytes]", project: "Project") -> bool:
    """Wait until it works, or has ended."""
    from graftwork.process.worker import lock_holder

    pause = threading.Event()
    while child.poll() is None:
        if lock_holder(project.state / "pipeline") == child.pid:
            return True
        pause.wait(POLL_SECONDS)
    return False


def _failed_at_once(code: int, log: Path) -> Exception:
    from graftwork.records.errors import WorkerFailed

    last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return WorkerFailed(
        f"it ended at once, with exit code {code}",
        why=last or "it left no output",
        fix="mend what it says, then run the same command again",
        where=str(log),
    )


def _current_run(project: "Project") -> str | None:
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.runs import find_run

    with use_project(project, NullReporter()) as work:
        run = find_run(work)
    return run.id if run is not None and run.state == "running" else None


def _say(as_json: bool, *, state: str, run: str | None, pid: int, log: Path | None) -> None:
    from graftwork.cli.output import print_json, stdout

    if as_json:
        print_json({"state": state, "run": run, "pid": pid, "log": str(log) if log else None})
        return
    what = f"run [bold]{run}[/]" if run else "the work"
    if state == "nothing left to do":
        stdout.print(f"{what} is done already: nothing is left to do", highlight=False)
        return
    stdout.print(f"{what} {state} in the background (process {pid})", highlight=False)
    asked = f" --run {run}" if run else ""
    stdout.print(f"  follow it:  graft logs -f{asked}", highlight=False)
    stdout.print("  how is it:  graft status", highlight=False)
    stdout.print("  stop it:    graft stop", highlight=False)
    if log is not None:
        stdout.print(f"  its words:  {log}", highlight=False, soft_wrap=True)
