"""Replicas by load: when the rule starts and stops them, real processes, the command hook, idle cost."""

import asyncio
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from serve_harness import DEADLINE

from graftwork.serve.api.call import ChatLimits
from graftwork.serve.api.chat import parse_chat_body
from graftwork.serve.autoscaler import Autoscaler, ScaleRule
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.engines import EngineSet
from graftwork.serve.failover.settings import AutoscaleSettings
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

SETTINGS = AutoscaleSettings(min=1, max=3, queue=4, up_seconds=2, idle_seconds=60)


def test_load_must_last_before_a_replica_starts_or_stops():
    rule = ScaleRule(SETTINGS)
    assert rule.decide(replicas=1, under_way=9, now=0) == 1
    assert rule.decide(replicas=1, under_way=9, now=1) == 1
    assert rule.decide(replicas=1, under_way=9, now=2) == 3
    assert rule.decide(replicas=3, under_way=1, now=10) == 3
    assert rule.decide(replicas=3, under_way=12, now=30) == 3  # busy again: idling starts over
    assert rule.decide(replicas=3, under_way=0, now=60) == 3
    assert rule.decide(replicas=3, under_way=0, now=119) == 3
    assert rule.decide(replicas=3, under_way=0, now=120) == 2


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 200)), max_size=40))
def test_replicas_never_leave_their_limits(load):
    rule, replicas, now = ScaleRule(SETTINGS), 1, 0.0
    for under_way, passed in load:
        now += passed
        replicas = rule.decide(replicas=replicas, under_way=under_way, now=now)
        assert SETTINGS.min <= replicas <= SETTINGS.max


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"autoscale": {"min": 3, "max": 2}}, "above max"),
        ({"autoscale": {"max": 0}}, "max"),
        ({"autoscale": {"max": 2, "queue": 0}}, "queue"),
        ({"autoscale": {"max": 2, "command": ["x"]}}, "starts processes here"),
        (
            {
                "kind": "vllm",
                "replicas": [{"url": "http://127.0.0.1:1/v1"}],
                "autoscale": {"max": 2, "command": ["x"]},
            },
            "lists fewer servers",
        ),
    ],
)
def test_what_cannot_scale_is_refused_by_name(engine, message):
    with pytest.raises(ValidationError) as refused:
        ServeSettings.model_validate({"engine": engine})
    assert message in str(refused.value)


def call():
    return parse_chat_body({"messages": [{"role": "user", "content": "hi"}]}, ChatLimits())


async def until(holds):
    async with asyncio.timeout(DEADLINE):
        while not holds():
            await asyncio.sleep(0.02)


def test_processes_start_under_load_and_stop_when_idle_without_a_failed_request(run, tmp_path):
    settings = ServeSettings.model_validate(
        {
            "engine": {
                "autoscale": {"max": 2, "queue": 2, "up_seconds": 1, "idle_seconds": 5, "usd_per_hour": 3.6}
            }
        }
    )
    job = EngineJob(folder=str(tmp_path), base_folder="none")

    async def main():
        engines = EngineSet(job, settings, module="graftwork.serve.stub_engine")
        await engines.start()
        try:
            scaler = Autoscaler(settings.engine.autoscale, engines=engines)
            pool = engines.pool
            assert len(pool.replicas) == 1
            await scaler.step(0)
            pool.replicas[0].outstanding += 4  # as if four users waited
            await scaler.step(1)
            await scaler.step(2)
            assert engines.scale == 2
            await until(lambda: [r.engine.state for r in pool.replicas] == ["ready", "ready"])
            answers = await asyncio.gather(*(engines.pool.complete(call(), model="base") for _ in range(8)))
            assert {answer["replica"] for answer in answers} == {"1", "2"}
            pool.replicas[0].outstanding -= 4
            for now in (10, 12, 16):
                await scaler.step(now)
            assert engines.scale == 1
            await until(lambda: len(pool.replicas) == 1)
            assert (await engines.pool.complete(call(), model="base"))["text"] == "[base] hi"
            shown = scaler.describe()
            assert (shown["started"], shown["stopped"], shown["replicas"]) == (1, 1, 1)
            assert 0 < shown["idle_seconds"] < shown["replica_seconds"]
            assert shown["idle_usd"] == pytest.approx(shown["idle_seconds"] / 1000, rel=0.01)
            assert shown["idle_memory_gib"] > 0
            assert scaler.gauges()["graft_replicas_wanted"] == 1
        finally:
            await engines.stop()

    run(main)


@pytest.mark.parametrize("launched", [False, True])
def test_a_replica_that_is_not_needed_any_more_while_it_starts_leaves_no_process(run, tmp_path, launched):
    two = ServeSettings.model_validate({"engine": {"replicas": 2}})

    async def main():
        engines = EngineSet(
            EngineJob(folder=str(tmp_path), base_folder="none"),
            ServeSettings(),
            module="graftwork.serve.stub_engine",
        )
        await engines.start()
        try:
            engines.revise(two)
            added = engines.pool.replicas[1].engine
            if launched:
                await until(lambda: added._process is not None)
            engines.revise(ServeSettings())
            await until(lambda: set(engines._engines) == {"1"} and not engines.pool._tasks)
            assert added.state == "stopped"
            assert added._watch is None
            assert added._process is None or added._process.returncode is not None
        finally:
            await engines.stop()

    run(main)


def test_an_engine_ends_although_the_wait_for_its_end_is_cancelled(run, tmp_path):
    async def main():
        engines = EngineSet(
            EngineJob(folder=str(tmp_path), base_folder="none"),
            ServeSettings(),
            module="graftwork.serve.stub_engine",
        )
        await engines.start()
        engine = engines.pool.replicas[0].engine
        stopping = asyncio.create_task(engine.stop())
        while engine.state != "stopped":
            await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert engine._process.returncode is not None

    run(main)


class ListedServers:
    """Three servers elsewhere, as the autoscaler sees them."""

    def __init__(self):
        self.urls = [f"http://10.0.0.{n}:8000/v1" for n in (1, 2, 3)]
        self.scale = 1
        self.pool = type("Pool", (), {"replicas": [type("R", (), {"outstanding": 9, "engine": self})()]})()
        self.state = "ready"

    def scale_to(self, replicas):
        """Replicas end later: call `end_replica`."""
        self.scale = replicas

    def end_replica(self, number):
        self.on_retired(self.urls[number])


def logging_command(log):
    """Writes what it is asked; the third server does not start."""
    script = (
        "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n'); "
        "sys.exit('10.0.0.3' in sys.argv[3])"
    )
    return (sys.executable, "-c", script, str(log))


def test_a_command_starts_and_stops_servers_elsewhere_and_a_failing_one_changes_nothing(run, tmp_path):
    log = tmp_path / "log"
    asked = AutoscaleSettings(max=3, queue=4, up_seconds=0, idle_seconds=0, command=logging_command(log))

    async def main():
        servers = ListedServers()
        scaler = Autoscaler(asked, engines=servers)
        await scaler.start()
        await scaler.step(0)  # three are needed, the third does not start
        assert servers.scale == 2
        await scaler.step(1)
        assert servers.scale == 2  # it is not tried again at once
        servers.pool.replicas[0].outstanding = 0
        await scaler.step(2)
        assert servers.scale == 1
        first, second, third = servers.urls
        lines = [f"start {first}", f"start {second}", f"start {third}"]
        assert log.read_text().splitlines() == lines  # the second one still finishes its answers
        servers.end_replica(1)
        await scaler.close()
        assert log.read_text().splitlines() == [*lines, f"stop {second}", f"stop {first}"]
        broken = Autoscaler(asked.model_copy(update={"command": ("/nowhere",)}), engines=ListedServers())
        await broken.step(0)
        assert broken.started == 0

    run(main)


def test_a_server_that_is_needed_again_is_not_stopped_when_its_old_replica_ends(run, tmp_path):
    log = tmp_path / "log"
    asked = AutoscaleSettings(max=2, queue=4, up_seconds=0, idle_seconds=0, command=logging_command(log))

    async def main():
        servers = ListedServers()
        scaler = Autoscaler(asked, engines=servers)
        await scaler.step(0)
        servers.pool.replicas[0].outstanding = 0
        await scaler.step(1)
        servers.pool.replicas[0].outstanding = 9
        await scaler.step(2)
        servers.end_replica(1)
        await until(lambda: not scaler._stops)
        assert servers.scale == 2
        assert log.read_text().splitlines() == [f"start {servers.urls[1]}"] * 2

    run(main)


def test_serving_starts_its_servers_first_follows_the_load_and_stops_them_last(run, tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.serve.autoscaler.TICK_SECONDS", 0.01)
    log, urls = tmp_path / "log", [f"http://10.0.0.{n}:8000/v1" for n in (1, 2)]
    scale = {"max": 2, "queue": 1, "up_seconds": 0, "idle_seconds": 0, "command": logging_command(log)}
    settings = ServeSettings.model_validate(
        {
            "port": 0,
            "engine": {"kind": "vllm", "replicas": [{"url": url} for url in urls], "autoscale": scale},
        }
    )

    def lines():
        return log.read_text().splitlines()

    async def main():
        ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        sets = []
        monkeypatch.setattr("graftwork.serve.run.EngineSet", lambda *a, **k: keep(sets, EngineSet(*a, **k)))
        task = asyncio.create_task(
            serve(
                settings,
                engine_job=EngineJob(folder=str(tmp_path / "engine"), base_folder="none"),
                project=ServedProject(resolve_aliases=dict),
                on_ready=lambda url: ready.set_result((url, lines())),
                stop=stop,
                engine_module="graftwork.serve.stub_engine",
            )
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
        url, begun = task.result() if task.done() else ready.result()
        assert begun == [f"start {urls[0]}"]
        first = sets[0].pool.replicas[0]
        first.outstanding += 2  # as if two users waited
        await until(lambda: [r.engine.state for r in sets[0].pool.replicas] == ["ready", "ready"])
        second = sets[0].pool.replicas[1]
        second.outstanding += 1
        first.outstanding -= 2
        await until(lambda: second not in sets[0].pool.replicas)
        assert lines() == [f"start {url}" for url in urls]
        second.outstanding -= 1
        await until(lambda: f"stop {urls[1]}" in lines())
        http = Client(port=int(url.rpartition(":")[2]))
        health = json.loads(await (await http.send("GET", "/health")).read())
        assert (health["autoscale"]["started"], health["autoscale"]["stopped"]) == (1, 1)
        stop.set()
        await asyncio.wait_for(task, DEADLINE)
        assert lines()[3:] == [f"stop {urls[0]}"]

    run(main)


def keep(kept, made):
    kept.append(made)
    return made
