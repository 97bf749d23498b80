"""An endpoint over real engine processes that are killed, frozen, added and removed while clients ask."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest
from serve_harness import DEADLINE, RELEASE

from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.process.worker import lock_holder
from graftwork.records.errors import UserError
from graftwork.serve.own_endpoint import reload_endpoint
from graftwork.serve.run import ServedProject, SettingsReloader, plan_reload, serve
from graftwork.serve.settings import ServeSettings

JSON = (("content-type", "application/json"),)
PATIENT = {"frozen_seconds": 60.0}
"""An engine that a busy machine keeps waiting is not frozen."""


class Endpoint:
    """A served project whose settings and aliases a test can change."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.aliases = {"champion": RELEASE}
        self.settings = self.read(**settings)
        self.failures = []
        self.answers = 0

    def read(self, **settings):
        base = {"port": 0, "failover": PATIENT}
        return ServeSettings.model_validate({**base, **settings})

    def read_settings(self):
        if self.settings is None:
            raise UserError("graft.yaml is not valid")
        return self.settings

    @asynccontextmanager
    async def serve(self):
        ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        project = ServedProject(
            resolve_aliases=lambda: dict(self.aliases),
            find_adapter=lambda _release: str(self.folder),
            refresh_seconds=0.02,
            read_settings=self.read_settings,
        )
        job = EngineJob(folder=str(self.folder / "engine"), base_folder="none", adapters={RELEASE: "none"})
        task = asyncio.create_task(
            serve(
                self.settings,
                engine_job=job,
                project=project,
                on_ready=ready.set_result,
                stop=stop,
                engine_module="stub_engine",
            )
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
        if task.done():
            task.result()
        self.http = Client(port=int(ready.result().rpartition(":")[2]))
        try:
            yield self
        finally:
            self.http.close()
            stop.set()
            await asyncio.wait_for(task, DEADLINE)

    async def ask(self, model="champion"):
        """Status, headers and text; every answer must name the release that gave it."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
        reply = await self.http.send("POST", "/v1/chat/completions", body=body, headers=JSON)
        answer = json.loads(await reply.read())
        if reply.status == 200:
            text = answer["choices"][0]["message"]["content"]
            assert text == f"[{reply.headers['x-graft-release']}] hello"
            self.answers += 1
        else:
            self.failures.append((reply.status, answer["error"]["code"]))
        return reply.status, reply.headers

    @asynccontextmanager
    async def load(self, clients=4):
        """So many clients that ask on and on while the block runs. None of them may see an error."""
        going = True

        async def client():
            while going:
                await self.ask()
                await asyncio.sleep(0.005)  # leave the engines time to start

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        yield
        going = False
        await asyncio.gather(*tasks)
        assert not self.failures
        assert self.answers >= clients

    async def replicas(self):
        engine = json.loads((await self.http.fetch("GET", "/health"))[1])["engine"]
        return {replica["name"]: replica for replica in engine["replicas"]}

    async def until(self, check):
        async with asyncio.timeout(DEADLINE):
            while not check(await self.replicas()):
                await asyncio.sleep(0.02)
        return await self.replicas()

    async def reload(self):
        return await asyncio.to_thread(reload_endpoint, self.folder / "engine")


def all_ready(count):
    def check(replicas):
        return len(replicas) == count and all(r["state"] == "ready" for r in replicas.values())

    return check


def test_no_request_fails_while_one_of_two_engines_is_killed_and_restarted(run, tmp_path):
    async def main():
        async with Endpoint(tmp_path, engine={"replicas": 2}).serve() as endpoint:
            replicas = await endpoint.until(all_ready(2))
            async with endpoint.load():
                os.kill(replicas["1"]["pid"], signal.SIGKILL)
                await endpoint.until(lambda now: now["1"]["restarts"] == 1 and all_ready(2)(now))
                before = endpoint.answers
                while endpoint.answers < before + 20:
                    await asyncio.sleep(0.01)
            replicas = await endpoint.replicas()
            assert replicas["1"]["requests"] > 0

    run(main)


def test_a_frozen_engine_is_replaced_while_the_other_one_answers(run, tmp_path):
    async def main():
        # The other engine must answer within the silence that the frozen one is allowed.
        quick = {"frozen_seconds": 2.0}
        async with Endpoint(tmp_path, engine={"replicas": 2}, failover=quick).serve() as endpoint:
            replicas = await endpoint.until(all_ready(2))
            async with endpoint.load():
                os.kill(replicas["2"]["pid"], signal.SIGSTOP)
                await endpoint.until(lambda now: now["2"]["restarts"] == 1 and all_ready(2)(now))

    run(main)


def test_an_alias_that_moves_under_load_fails_no_request_and_every_header_is_true(run, tmp_path):
    async def main():
        async with Endpoint(tmp_path, engine={"replicas": 2}).serve() as endpoint:
            await endpoint.until(all_ready(2))
            async with endpoint.load():
                for number in range(10):
                    endpoint.aliases["champion"] = release = f"{number:016x}"
                    while (await endpoint.ask())[1]["x-graft-release"] != release:
                        pass

    run(main)


def test_replicas_and_settings_change_under_load_without_a_failed_request(run, tmp_path):
    async def main():
        async with Endpoint(tmp_path).serve() as endpoint, endpoint.load(clients=4):
            endpoint.settings = endpoint.read(engine={"replicas": 2}, max_new_tokens=7, batch_size=3)
            result = await endpoint.reload()
            assert result.changed == ("max_new_tokens", "engine.replicas")
            assert result.restart == ("batch_size",)
            replicas = await endpoint.until(all_ready(2))
            while (await endpoint.ask())[1]["x-graft-replica"] != "2":
                pass
            endpoint.settings = None
            with pytest.raises(UserError, match="old settings: graft\\.yaml is not valid"):
                await endpoint.reload()
            endpoint.settings = endpoint.read()
            assert (await endpoint.reload()).changed == ("max_new_tokens", "engine.replicas")
            await endpoint.until(all_ready(1))
            async with asyncio.timeout(DEADLINE):
                while lock_holder(tmp_path / "engine" / "replica-2") is not None:
                    await asyncio.sleep(0.01)
            assert replicas["2"]["pid"] != replicas["1"]["pid"]

    run(main)


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones(run, tmp_path):
    async def main():
        async with Endpoint(tmp_path).serve() as endpoint:
            await endpoint.ask()
            pid = (await endpoint.replicas())["1"]["pid"]
            os.kill(pid, signal.SIGSTOP)
            running = asyncio.create_task(endpoint.ask())
            while (await endpoint.replicas())["1"]["outstanding"] == 0:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(DEADLINE):
                while (await endpoint.http.fetch("GET", "/health"))[0] == 200:
                    await asyncio.sleep(0.01)
            status, headers = await endpoint.ask()
            assert (status, headers["retry-after"]) == (503, "1")
            assert endpoint.failures == [(503, "stopping")]
            os.kill(pid, signal.SIGCONT)
            assert (await running)[0] == 200

    run(main)


def test_only_settings_that_a_running_endpoint_can_take_over_are_reloaded():
    old = ServeSettings()
    new = ServeSettings.model_validate(
        {"port": 9000, "engine": "llamacpp", "default_model": "base", "failover": {"retries": 3}}
    )
    settings, changed, restart = plan_reload(old, new)
    assert changed == ("default_model", "failover")
    assert restart == ("engine", "port")
    assert settings == old.model_copy(update={"default_model": "base", "failover": new.failover})
    assert plan_reload(old, old)[1:] == ((), ())


def test_times_that_an_engine_gets_at_its_start_need_a_restart():
    old = ServeSettings()
    times = {"frozen_seconds": 10.0, "start_seconds": 60.0}
    plan = plan_reload(old, ServeSettings.model_validate({"failover": times}))
    assert plan == (old, (), ("failover.frozen_seconds", "failover.start_seconds"))
    settings, changed, _ = plan_reload(
        old, ServeSettings.model_validate({"failover": {**times, "retries": 3}})
    )
    assert changed == ("failover",)
    assert settings.failover == old.failover.model_copy(update={"retries": 3})


class Part:
    """A part of the endpoint that a reload revises."""

    def __init__(self):
        self.revised, self.error = [], None

    def revise(self, settings, **_):
        self.revised.append(settings)

    async def refresh(self):
        if self.error is not None:
            raise self.error


def test_a_reload_that_cannot_read_the_aliases_reports_the_settings_that_it_applied(run, tmp_path):
    async def main():
        parts = {name: Part() for name in ("gateway", "engines", "watcher")}
        parts["watcher"].error = OSError("the database is busy")
        new = ServeSettings(max_new_tokens=7)
        reloader = SettingsReloader(ServeSettings(), read=lambda: new, folder=tmp_path, **parts)
        result = await reloader.reload()
        assert (result.changed, result.error) == (("max_new_tokens",), None)
        assert reloader.settings == new
        assert all(part.revised for part in parts.values())

    run(main)


def test_a_reload_that_fails_does_not_end_the_next_ones(run, tmp_path):
    async def main():
        parts = {name: Part() for name in ("gateway", "engines", "watcher")}
        found = [ZeroDivisionError(), ServeSettings(max_new_tokens=7)]

        def read():
            if isinstance(found[0], Exception):
                raise found.pop(0)
            return found[0]

        reloader = SettingsReloader(ServeSettings(), read=read, folder=tmp_path, **parts)
        following = asyncio.create_task(reloader.follow())
        async with asyncio.timeout(DEADLINE):
            while reloader.settings.max_new_tokens != 7:
                reloader.asked.set()
                await asyncio.sleep(0.01)
        assert not following.done()
        following.cancel()

    run(main)
