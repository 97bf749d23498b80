"""An engine is forked with its imports done where possible, and ends with the process that needs it."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from graftwork.engines.protocol import EngineJob
from graftwork.process import preload
from graftwork.process.preload import PreloadedWorkers
from graftwork.process.worker import WORKER_ENVIRONMENT
from graftwork.records.errors import WorkerFailed
from graftwork.serve.settings import FailoverSettings
from graftwork.serve.supervisor import EngineSupervisor, ForkedEngine, start_engine

ENGINE = """
import os, sys
print("imported", "sqlite3" in sys.modules, sys.argv[1:], flush=True)
while os.read(0, 1):
    pass
sys.exit(9)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "some_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delenv("GRAFT_PRELOAD", raising=False)
    if not preload.is_supported():
        pytest.skip("workers are forked on Linux only")
    started = PreloadedWorkers(("sqlite3",), package="some_")
    yield started
    started.stop()


def run(main):
    return asyncio.run(asyncio.wait_for(main, 300))


async def start(workers, tmp_path):
    return await start_engine("some_engine", tmp_path / "job", log=tmp_path / "log", workers=workers)


async def read_log(tmp_path):
    while not (text := (tmp_path / "log").read_text()):
        await asyncio.sleep(0.01)
    return text


def warm_up(workers):
    workers.warm_up({**WORKER_ENVIRONMENT, **os.environ})


def test_an_engine_is_forked_from_the_process_with_the_imports_and_stopped_like_another(workers, tmp_path):
    warm_up(workers)

    async def main():
        engine = await start(workers, tmp_path)
        assert isinstance(engine, ForkedEngine)
        assert await read_log(tmp_path) == f"imported True ['{tmp_path / 'job'}']\n"
        assert engine.returncode is None
        waiting = asyncio.create_task(engine.wait())
        engine.terminate()
        assert await engine.wait() == -signal.SIGTERM
        assert (await waiting, engine.returncode) == (-signal.SIGTERM, -signal.SIGTERM)
        engine.kill()  # which has ended: nothing is done to who has its number now

    run(main())


def test_a_forked_engine_ends_when_the_pipe_to_it_is_closed(workers, tmp_path):
    warm_up(workers)

    async def main():
        engine = await start(workers, tmp_path)
        os.dup2(os.open(os.devnull, os.O_RDONLY), engine._stdin)
        assert await engine.wait() == 9

    run(main())


def test_a_start_that_is_given_up_leaves_no_engine_behind(workers, tmp_path):
    warm_up(workers)

    async def main():
        starting = asyncio.create_task(start(workers, tmp_path))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(main())
    pid = workers._process.pid
    while Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        time.sleep(0.01)


def test_without_the_process_with_the_imports_an_engine_is_a_new_interpreter(workers, tmp_path):
    async def main():
        engine = await start(workers, tmp_path)
        assert await read_log(tmp_path) == f"imported False ['{tmp_path / 'job'}']\n"
        engine.kill()
        assert await engine.wait() == -signal.SIGKILL

    run(main())


SILENT = """
import json, socket, sys
job = json.load(open(sys.argv[1]))
print("loading layer 3", flush=True)
if job["base_folder"] == "listens":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(job["socket"])
    listener.listen()
sys.stdin.read()
"""


@pytest.mark.parametrize("base", ["loads", "listens"])
def test_an_engine_that_never_answers_after_its_start_is_killed_and_says_so(tmp_path, monkeypatch, base):
    (tmp_path / "silent_engine.py").write_text(SILENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    job = EngineJob(folder=str(tmp_path), base_folder=base)

    async def main():
        down = asyncio.Event()
        engine = EngineSupervisor(
            job,
            module="silent_engine",
            first_pause=60.0,
            probe=FailoverSettings(start_seconds=0.5),
            on_change=lambda state: down.set() if state == "down" else None,
        )
        with pytest.raises(WorkerFailed, match=r"did not answer within 0\.5 s of its start") as failed:
            await engine.start()
        assert "start_seconds" in failed.value.fix
        assert engine._process.returncode == -signal.SIGKILL
        # Where other replicas serve, it is tried again, and its state says why.
        engine.keep_trying()
        await down.wait()
        assert "did not answer" in engine.describe()["reason"]
        await engine.stop()

    run(main())
