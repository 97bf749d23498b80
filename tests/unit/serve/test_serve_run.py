"""Serving as a whole, with the stand-in as a real child process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink

from free_ports import free_port
from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.process.worker import hold_lock, lock_holder
from graftwork.records.errors import Busy, UserError, WorkerFailed
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.run import run as run_loop
from graftwork.serve.settings import ServeSettings

STUB = "stub_engine"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


def job_in(folder: Path) -> EngineJob:
    return EngineJob(folder=str(folder / "engine"), base_folder="none", adapters={RELEASE: "none"})


@asynccontextmanager
async def serving(folder, sink=None, **more):
    ready = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    settings = more.pop("settings", ServeSettings(port=0))
    project = ServedProject(
        resolve_aliases=more.pop("resolve_alias", lambda: {"champion": RELEASE}),
        find_adapter=more.pop("find_adapter", lambda _release: None),
        refresh_seconds=0.02,
        captures=sink,
    )
    task = asyncio.create_task(
        serve(
            settings,
            engine_job=job_in(folder),
            project=project,
            on_ready=ready.set_result,
            stop=stop,
            engine_module=STUB,
            **more,
        )
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
    if task.done():
        task.result()
    yield Client(port=int(ready.result().rpartition(":")[2]))
    stop.set()
    await asyncio.wait_for(task, DEADLINE)


async def ask(http):
    headers = (("content-type", "application/json"),)
    reply = await http.send("POST", "/v1/chat/completions", body=BODY, headers=headers)
    return reply.status, json.loads(await reply.read())


async def until(check):
    """Ask again until it holds."""
    async with asyncio.timeout(DEADLINE):
        while not (found := await check()):
            await asyncio.sleep(0.01)
    return found


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("go", [asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def test_the_endpoint_answers_until_it_is_stopped_and_leaves_no_engine_behind(tmp_path, go):
    async def main():
        sink = ListSink()
        async with serving(tmp_path, sink) as http:
            status, answer = await ask(http)
            assert status == 200
            assert answer["system_fingerprint"] == RELEASE
            pid = json.loads((await http.fetch("GET", "/health"))[1])["engine"]["pid"]
            assert is_alive(pid)
        assert not is_alive(pid)
        assert lock_holder(tmp_path / "engine") is None
        assert [capture.reply for capture in sink.captures] == [f"[{RELEASE}] hello"]

    go(main())


def test_a_killed_engine_is_an_event_and_not_an_outage(run, tmp_path):
    async def main():
        async with serving(tmp_path) as http:
            pid = json.loads((await http.fetch("GET", "/health"))[1])["engine"]["pid"]
            os.kill(pid, signal.SIGKILL)
            seen = []

            async def asked_until_down():
                seen.append((await ask(http))[0])
                return seen[-1] == 503

            async def asked_until_well():
                seen.append((await ask(http))[0])
                return seen[-1] == 200

            await until(asked_until_down)
            await until(asked_until_well)
            assert set(seen) <= {200, 503}
            engine = json.loads((await http.fetch("GET", "/health"))[1])["engine"]
            assert engine["restarts"] == 1
            assert engine["pid"] != pid

    run(main)


def test_an_alias_that_moves_to_a_new_release_loads_it_first(run, tmp_path):
    async def main():
        aliases = {"champion": RELEASE}
        folder = str(tmp_path)
        async with serving(
            tmp_path, resolve_alias=lambda: dict(aliases), find_adapter=lambda _release: folder
        ) as http:
            assert (await ask(http))[1]["system_fingerprint"] == RELEASE
            aliases["champion"] = OTHER

            async def moved():
                return (await ask(http))[1]["system_fingerprint"] == OTHER

            await until(moved)

    run(main)


def test_until_the_aliases_are_loaded_their_names_are_answered_with_a_status_that_clients_retry(
    run, tmp_path
):
    async def main():
        port = free_port()
        asked, may_answer = threading.Event(), threading.Event()

        def resolve():
            asked.set()
            may_answer.wait(DEADLINE)
            return {"champion": RELEASE}

        async def look(http):
            assert await asyncio.to_thread(asked.wait, DEADLINE)
            headers = (("content-type", "application/json"),)
            reply = await http.send("POST", "/v1/chat/completions", body=BODY, headers=headers)
            assert reply.status == 503
            assert reply.headers["retry-after"] == "1"
            assert json.loads(await reply.read())["error"]["code"] == "starting"
            for path in ("/v1/models", "/health"):
                assert (await http.fetch("GET", path))[0] == 503
            may_answer.set()

        looking = asyncio.create_task(look(Client(port=port)))
        settings = ServeSettings(port=port)
        async with serving(tmp_path, settings=settings, resolve_alias=resolve) as http:
            await looking
            assert (await ask(http))[0] == 200
            assert (await http.fetch("GET", "/health"))[0] == 200

    run(main)


def test_a_database_that_cannot_be_read_for_a_while_changes_nothing(run, tmp_path):
    async def main():
        fail = asyncio.Event()
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def resolve():
            if fail.is_set():
                loop.call_soon_threadsafe(failed.set)
                raise OSError("the database is locked")
            return {"champion": RELEASE}

        async with serving(tmp_path, resolve_alias=resolve) as http:
            fail.set()
            await asyncio.wait_for(failed.wait(), DEADLINE)
            assert (await ask(http))[0] == 200

    run(main)


def test_threads_of_the_gateway_give_requests_the_interpreter_soon():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)

    async def read():
        return sys.getswitchinterval()

    try:
        assert run_loop(read()) <= 0.001
    finally:
        sys.setswitchinterval(before)


def test_an_engine_that_cannot_start_says_why(run, tmp_path):
    async def main():
        with hold_lock(tmp_path / "engine"), pytest.raises(Busy, match="another worker"):
            async with serving(tmp_path):
                pass
        with pytest.raises(WorkerFailed, match="exit code 1") as failure:
            await serve(
                ServeSettings(port=0),
                engine_job=job_in(tmp_path),
                project=ServedProject(resolve_aliases=dict),
                engine_module="graftwork.serve.no_such_module",
            )
        assert "no_such_module" in failure.value.why

    run(main)


def test_a_port_that_is_taken_is_the_users_mistake(run, tmp_path):
    async def main():
        async with serving(tmp_path) as http:
            settings = ServeSettings(port=http._port)
            with pytest.raises(UserError, match="cannot listen on"):
                async with serving(tmp_path / "second", settings=settings):
                    pass

    run(main)


def test_other_machines_are_served_only_with_a_key(run, tmp_path, monkeypatch):
    async def main(settings):
        async with serving(tmp_path, settings=settings):
            pass

    with pytest.raises(UserError, match="needs a key"):
        run(lambda: main(ServeSettings(host="0.0.0.0", port=0)))
    monkeypatch.delenv("GRAFT_TEST_KEY", raising=False)
    with pytest.raises(UserError, match="GRAFT_TEST_KEY is not set"):
        run(lambda: main(ServeSettings(host="0.0.0.0", port=0, api_key_env="GRAFT_TEST_KEY")))
    monkeypatch.setenv("GRAFT_TEST_KEY", "k")
    run(lambda: main(ServeSettings(host="0.0.0.0", port=0, api_key_env="GRAFT_TEST_KEY")))


SERVE = """
import sys
from pathlib import Path
from graftwork.engines.protocol import EngineJob
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings
job = EngineJob(folder=sys.argv[1], base_folder="none", adapters={"r1r1r1r1": "none"})
project = ServedProject(resolve_aliases=lambda: {"champion": "r1r1r1r1"})
run(serve(ServeSettings(port=0), engine_job=job, project=project,
          on_ready=lambda url: print(url, flush=True), engine_module="stub_engine"))
print("ended", flush=True)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_the_gateway_ends_the_engine_ends_too(tmp_path, kind):
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout.readline().startswith("http://127.0.0.1:")
        engine = lock_holder(tmp_path)
        assert is_alive(engine)
        gateway.send_signal(kind)
        rest = gateway.stdout.read()
        code = gateway.wait(DEADLINE)
    deadline = time.monotonic() + DEADLINE
    while is_alive(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(engine)
    if kind != signal.SIGKILL:
        assert (code, rest) == (0, "ended\n")
