"""What the flow tests share: `graft` as a process, an open project, a run, an endpoint."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

from graftwork.engines.protocol import EngineJob
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import lock_holder
from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject, use_project
from graftwork.project.reporter import NullReporter
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

WORDS = "fern moss ivy lotus maple willow cedar thyme sage basil orchid lily tulip rose iris daisy"
PLANTS = WORDS.split()
PLACES = ["pond", "gate", "wall", "court", "terrace", "orchard", "glasshouse", "meadow"]
GRAFT = [sys.executable, "-m", "graftwork.cli.main"]
DEADLINE = 300.0
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def opened(folder: Path, reporter=None, **options) -> AbstractContextManager[OpenProject]:
    return use_project(open_project(folder), reporter or NullReporter(), **options)


def run(folder: Path, reporter=None, upto: str | None = None) -> StepOutputs:
    with opened(folder, reporter) as work:
        return run_pipeline(work, upto=upto)


def start_graft(folder: Path, *words: str, **options) -> subprocess.Popen[str]:
    """`graft` in a process that hears Ctrl-C: a suite in the background has it switched off."""
    command = ["env", "--default-signal=INT", *GRAFT, *words, "-C", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=ONE_THREAD, **{**pipes, **options})


def graft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    process = start_graft(folder, *words)
    output, errors = process.communicate()
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def graft_json(folder: Path, *words: str, exit_code: int = 0):
    """The document that the command prints."""
    done = graft(folder, *words, "--json")
    assert done.returncode == exit_code, done.stderr + done.stdout
    return json.loads(done.stdout)


def run_folder(folder: Path) -> Path:
    (only,) = (folder / ".graft" / "runs").iterdir()
    return only


def wait_for_steps(folder: Path, process: subprocess.Popen, *, steps: int) -> Path:
    """Wait until the worker has journaled so many lines; the run's folder."""
    runs = folder / ".graft" / "runs"
    while True:
        assert process.poll() is None, process.communicate()
        journals = list(runs.glob("*/steps.jsonl")) if runs.exists() else []
        if journals and journals[0].read_bytes().count(b"\n") >= steps:
            return journals[0].parent
        time.sleep(0.01)


def wait_for_worker(folder: Path, *, alive: bool) -> int | None:
    """Wait until a process holds the run's folder, or none; its id."""
    while ((holder := lock_holder(folder)) is None) == alive:
        time.sleep(0.01)
    return holder


@asynccontextmanager
async def serving(settings: ServeSettings, *, job: EngineJob, project: ServedProject, **options):
    """The real endpoint while the block runs; gives its address."""
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    started = {"engine_job": job, "project": project, "on_ready": ready.set_result, "stop": stop}
    task = asyncio.create_task(serve(settings, **started, **options))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
    if task.done():
        task.result()
    try:
        yield ready.result()
    finally:
        stop.set()
        await asyncio.wait_for(task, DEADLINE)


def run_async(main):
    return asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE))
