"""Autoscaling with real engines: a second process starts under load, answers, and stops when it is idle."""

import asyncio
import json

import pytest

from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings

DEADLINE = 900.0
CLIENTS = 6
ANSWER = {
    "model": "base",
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 24,
    "temperature": 1.0,
}


async def ask(client):
    """Status and replica of one answer."""
    reply = await client.send(
        "POST",
        "/v1/chat/completions",
        body=json.dumps(ANSWER).encode(),
        headers=(("content-type", "application/json"),),
    )
    await reply.read()
    return reply.status, reply.headers.get("x-graft-replica")


async def read_autoscale(client):
    _, body = await client.fetch("GET", "/health", seconds=DEADLINE)
    return json.loads(body)["autoscale"]


@pytest.mark.parametrize("kind", ["embedded", "llamacpp"])
def test_a_real_engine_is_started_under_load_and_stopped_when_idle_without_a_failed_request(
    kind, tiny_base, tmp_path, monkeypatch
):
    if kind == "llamacpp":
        pytest.importorskip("xllamacpp")
    monkeypatch.setattr("graftwork.serve.autoscaler.TICK_SECONDS", 0.05)
    scale = {"max": 2, "queue": 2, "up_seconds": 0.1, "idle_seconds": 0.3, "usd_per_hour": 3.6}
    # On a busy machine an engine may be silent for a while; that is not what fails a request here.
    patient = {"frozen_seconds": DEADLINE, "restart_seconds": DEADLINE}
    settings = ServeSettings.model_validate(
        {"port": 0, "threads": 1, "engine": {"kind": kind, "autoscale": scale}, "failover": patient}
    )

    async def load(port, until):
        """Every client asks again and again; returns all answers."""
        found = []

        async def keep_asking():
            client = Client(port=port)
            while not until(found):
                found.append(await ask(client))
            client.close()

        await asyncio.gather(*(keep_asking() for _ in range(CLIENTS)))
        return found

    async def main():
        ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        task = asyncio.create_task(
            serve(
                settings,
                engine_job=EngineJob(folder=str(tmp_path / "engine"), base_folder=str(tiny_base)),
                project=ServedProject(resolve_aliases=dict),
                on_ready=ready.set_result,
                stop=stop,
            )
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        url = task.result() if task.done() else ready.result()
        port = int(url.rpartition(":")[2])
        answers = await load(port, lambda found: sum(by == "2" for _, by in found) >= CLIENTS)
        assert {status for status, _ in answers} == {200}
        client = Client(port=port)
        # On a slow machine the last answers take longer than a replica may be idle: then it goes with the
        # last of them, and only the other one is idle afterwards.
        while (shown := await read_autoscale(client))["replicas"] == 2 or not (
            shown["idle_now"] == 1 and shown["idle_seconds"] > 0
        ):
            await asyncio.sleep(0.05)
        assert shown["started"] == shown["stopped"] >= 1
        assert shown["idle_usd"] == pytest.approx(shown["idle_seconds"] / 1000, abs=0.001)
        assert shown["idle_memory_gib"] > 0.01
        assert (await ask(client))[0] == 200
        client.close()
        stop.set()
        await task

    async def bounded():
        async with asyncio.timeout(DEADLINE):
            await main()

    run(bounded())
