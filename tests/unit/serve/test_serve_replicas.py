"""Several replicas behind one gateway, over real sockets: balance, retries, circuit breakers, deadlines."""

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from serve_harness import DEADLINE, OTHER, RELEASE, FixedEngine, ListSink
from stub_engine import StubEngine

from graftwork.engines.process import PromptReleases, make_handler
from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.http.messages import ApiError
from graftwork.http.server import Server
from graftwork.records.errors import WorkerFailed
from graftwork.serve.answers import AnswerService
from graftwork.serve.api.chat import parse_chat_body
from graftwork.serve.captures import CaptureWriter
from graftwork.serve.family import Family
from graftwork.serve.gateway import Gateway
from graftwork.serve.replicas import EngineSet, Replica, ReplicaPool
from graftwork.serve.routing import Fallbacks, Routes, update_routes
from graftwork.serve.settings import FailoverSettings, FamilySettings, ServeSettings, SplitSettings
from graftwork.serve.supervisor import EngineClient

JSON = (("content-type", "application/json"),)


class FailingEngine(StubEngine):
    """A stand-in that can refuse, and that can be silent before its first token."""

    def __init__(self, models):
        super().__init__(models)
        self.error = None
        self.late_error = None
        """Comes after the first piece of a streamed answer."""
        self.open = asyncio.Event()
        self.open.set()

    async def generate(self, request):
        self.waiting.set()
        self.asked.append(request)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        async for piece in super().generate(request):
            yield piece
            if self.late_error is not None:
                raise self.late_error
        self.asked.pop()


class PooledEngine(FixedEngine):
    """A replica whose server is part of the test."""

    def __init__(self, client, stub):
        super().__init__(client)
        self.stub = stub
        self.on_change = lambda _state: None
        self.adapters = {}
        self.failure = None

    @property
    def state(self):
        return self.status["state"]

    @property
    def models(self):
        return self.stub.state()["models"]

    def describe(self):
        return {**self.status, "pid": None}

    async def start(self):
        if self.failure is not None:
            raise self.failure

    def keep_trying(self):
        self.tried = True

    def expect_adapter(self, name, folder):
        self.adapters[name] = folder

    async def load_adapter(self, name, folder, *, keep=()):
        del keep
        if self.failure is not None:
            raise self.failure
        self.stub._models.append(name)

    def abort_running(self):
        self.client.abort()

    async def stop(self):
        self.status["state"] = "stopped"

    def change(self, state):
        self.status["state"] = state
        self.on_change(state)


@dataclass
class Fleet:
    port: int
    http: Client
    stubs: list[FailingEngine]
    engines: list[PooledEngine]
    servers: list[Server]
    pool: ReplicaPool
    gateway: Gateway

    async def ask(self, text="hello", *, model="champion", headers=(), **more):
        messages = [{"role": "user", "content": text}]
        body = json.dumps({"model": model, "messages": messages, **more}).encode()
        reply = await self.http.send("POST", "/v1/chat/completions", body=body, headers=(*JSON, *headers))
        data = await reply.read()
        return reply.status, reply.headers, data if more.get("stream") else json.loads(data)

    def cut(self, number):
        for connection in list(self.servers[number].connections):
            connection.abort()


@asynccontextmanager
async def open_fleet(count=2, *, weights=None, endpoints=(), routes=None, sink=None, **failover):
    """`endpoints` are names of stand-ins that only fallback chains reach."""
    chosen = FailoverSettings.model_validate(failover)
    settings = ServeSettings(failover=chosen)
    routes = routes or Routes(releases=frozenset({RELEASE, OTHER}), aliases={"champion": RELEASE})
    stubs, engines, servers, replicas = [], [], [], []
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-"))
        for number in range(count + len(endpoints)):
            stub = FailingEngine([RELEASE, OTHER] if number < count else [])
            server = Server(make_handler(stub, PromptReleases()))
            path = str(Path(folder) / f"{number}.sock")
            await server.listen_unix(path)
            stack.push_async_callback(server.close)
            engine = PooledEngine(EngineClient(path=path), stub)
            weight = weights[number] if weights and number < count else 1.0
            replicas.append(Replica(str(number + 1), engine, weight=weight, settings=chosen))
            stubs.append(stub)
            engines.append(engine)
            servers.append(server)
        pool = ReplicaPool(replicas[:count], chosen)
        remotes = {
            name: ReplicaPool([replica], chosen)
            for name, replica in zip(endpoints, replicas[count:], strict=True)
        }
        captures = None if sink is None else CaptureWriter(sink)
        if captures is not None:
            captures.start()
            stack.push_async_callback(asyncio.to_thread, captures.close)
        gateway = Gateway(
            AnswerService(
                pool,
                settings=settings,
                routes=lambda: routes,
                captures=captures,
                fallbacks=Fallbacks({}, engine=pool, endpoints=remotes),
            )
        )
        server = gateway.open_server()
        port = await server.listen()
        stack.push_async_callback(server.close)
        http = Client(port=port)
        stack.callback(http.close)
        yield Fleet(port, http, stubs, engines, servers, pool, gateway)


def served_by(headers):
    return headers["x-graft-replica"]


# -- balance -------------------------------------------------------------------------------------


def test_requests_are_spread_over_the_replicas_by_weight(run):
    async def main():
        async with open_fleet(2, weights=[3.0, 1.0]) as fleet:
            names = [served_by((await fleet.ask())[1]) for _ in range(40)]
            assert (names.count("1"), names.count("2")) == (30, 10)

    run(main)


# -- retries and circuits ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_breaks_off_before_its_first_byte_is_not_seen_by_the_client(run, stream):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.stubs[0].open.clear()
            fleet.stubs[1].open.clear()
            asking = [asyncio.create_task(fleet.ask(stream=stream)) for _ in range(6)]
            while sum(len(stub.asked) for stub in fleet.stubs) < 6:
                await asyncio.sleep(0)
            fleet.stubs[1].open.set()
            fleet.cut(0)
            answers = await asyncio.gather(*asking)
            assert [status for status, _, _ in answers] == [200] * 6
            assert {served_by(headers) for _, headers, _ in answers} == {"2"}

    run(main)


def test_an_answer_that_has_begun_is_never_begun_again(run):
    async def main():
        async with open_fleet(2, fallback={"champion": ["base"]}) as fleet:
            for stub in fleet.stubs:
                stub.gate.clear()
            asking = asyncio.create_task(fleet.ask("one two three", stream=True))
            await asyncio.wait(
                [asyncio.create_task(stub.waiting.wait()) for stub in fleet.stubs],
                return_when=asyncio.FIRST_COMPLETED,
            )
            while not any(replica.outstanding for replica in fleet.pool.replicas):
                await asyncio.sleep(0)
            while not fleet.gateway.answers.streaming:
                await asyncio.sleep(0)
            fleet.cut(0)
            fleet.cut(1)
            status, _, data = await asking
            assert status == 200
            assert b'"code":"engine_down"' in data
            assert data.count(f"[{RELEASE}]".encode()) <= 1

    run(main)


def test_a_replica_that_keeps_failing_gets_no_requests_and_is_tried_again_later(run):
    async def main():
        async with open_fleet(2, breaker_failures=3, breaker_seconds=0.2) as fleet:
            now = 0.0
            fleet.pool.replicas[0].breaker._clock = lambda: now
            fleet.stubs[0].error = ApiError(502, "broken")
            statuses = [(await fleet.ask())[0] for _ in range(12)]
            assert statuses == [200] * 12
            assert fleet.pool.replicas[0].breaker.state != "closed"
            assert fleet.pool.replicas[0].failures == 3
            fleet.stubs[0].error = None
            now += 1.0
            async with asyncio.timeout(DEADLINE):
                while served_by((await fleet.ask())[1]) != "1":
                    await asyncio.sleep(0.01)
            assert fleet.pool.replicas[0].breaker.state == "closed"

    run(main)


def test_retries_stop_when_their_budget_is_spent(run):
    async def main():
        async with open_fleet(2, breaker_failures=1000) as fleet:
            fleet.pool.budget.revise(burst=2)
            for stub in fleet.stubs:
                stub.error = ApiError(502, "broken")
            for _ in range(30):
                assert (await fleet.ask())[0] == 502
            asked = sum(replica.assigned for replica in fleet.pool.replicas)
            assert 30 < asked <= 30 + 2 + 0.2 * 30
            assert fleet.pool.budget.refused > 20

    run(main)


def test_a_refused_request_is_refused_once(run):
    async def main():
        async with open_fleet(2) as fleet:
            for stub in fleet.stubs:
                stub.error = ApiError(400, "too long", param="messages")
            assert (await fleet.ask())[0] == 400
            assert sum(replica.assigned for replica in fleet.pool.replicas) == 1
            assert all(replica.failures == 0 for replica in fleet.pool.replicas)

    run(main)


@pytest.mark.parametrize(("status", "failures"), [(400, 0), (502, 1)])
def test_an_error_behind_the_first_piece_says_what_it_is_and_whose_fault(run, status, failures):
    async def main():
        async with open_fleet(1, fallback={"champion": ["base"]}) as fleet:
            fleet.stubs[0].late_error = ApiError(status, "too much work", param="tools", code="work")
            answered, _, data = await fleet.ask("one two three", stream=True)
            assert answered == 200
            last = json.loads(data.strip().rpartition(b"data: ")[2])["error"]
            assert (last["message"], last["param"], last["code"]) == ("too much work", "tools", "work")
            assert fleet.pool.replicas[0].failures == failures
            assert fleet.pool.replicas[0].outstanding == 0

    run(main)


def test_a_full_replica_sends_its_requests_to_another_one(run):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.stubs[0].error = ApiError(429, "full", code="full")
            assert {served_by((await fleet.ask())[1]) for _ in range(6)} == {"2"}
            fleet.stubs[1].error = ApiError(429, "full", code="full")
            status, headers, _ = await fleet.ask()
            assert (status, headers["retry-after"]) == (429, "1")
            assert all(replica.breaker.state == "closed" for replica in fleet.pool.replicas)

    run(main)


def test_requests_that_wait_for_a_frozen_replica_are_asked_elsewhere(run):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.stubs[0].open.clear()
            fleet.stubs[1].open.clear()
            asking = [asyncio.create_task(fleet.ask()) for _ in range(4)]
            while sum(len(stub.asked) for stub in fleet.stubs) < 4:
                await asyncio.sleep(0)
            fleet.engines[0].change("frozen")
            fleet.stubs[1].open.set()
            answers = await asyncio.gather(*asking)
            assert {(status, served_by(headers)) for status, headers, _ in answers} == {(200, "2")}

    run(main)


def test_a_single_replica_is_asked_even_if_its_circuit_is_open(run):
    async def main():
        async with open_fleet(1, breaker_failures=1, breaker_seconds=60.0, retries=0) as fleet:
            fleet.stubs[0].error = ApiError(500, "broken")
            assert (await fleet.ask())[0] == 500
            fleet.stubs[0].error = None
            assert (await fleet.ask())[0] == 200

    run(main)


# -- deadlines ---------------------------------------------------------------------------------


def test_a_slow_attempt_is_given_up_for_another_replica(run_with_limit):
    async def main(limit, pass_when):
        async with open_fleet(2, attempt_timeout_seconds=limit) as fleet:
            slow = fleet.stubs[0]
            slow.open.clear()
            for _ in range(4):
                before = len(slow.asked)
                passed = pass_when(lambda before=before: len(slow.asked) > before)
                status, headers, _ = await fleet.ask()
                assert (status, headers.get("x-graft-replica")) == (200, "2")
                passed.cancel()
            assert slow.asked

    run_with_limit(main)


def test_the_time_that_a_client_allows_reaches_the_engine_and_ends_the_request(run_with_limit):
    async def main(limit, pass_when):
        async with open_fleet(2) as fleet:
            for stub in fleet.stubs:
                stub.open.clear()
            pass_when(lambda: any(stub.asked for stub in fleet.stubs))
            status, _, answer = await fleet.ask(headers=(("x-request-timeout-ms", str(1000 * limit)),))
            asked = [request for stub in fleet.stubs for request in stub.asked]
            assert [0 < request.timeout_seconds <= limit for request in asked] == [True]
            assert (status, answer["error"]["code"]) == (504, "timeout")
            assert sum(replica.assigned for replica in fleet.pool.replicas) == 1
            for wrong in ("soon", "-1", "nan", "inf"):
                status, _, answer = await fleet.ask(headers=(("x-request-timeout-ms", wrong),))
                assert (status, answer["error"]["param"]) == (400, "x-request-timeout-ms")

    run_with_limit(main)


# -- fallback chains -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_is_followed_to_its_end_and_the_header_says_who_answered_and_why(run, stream):
    async def main():
        chain = {"champion": ["base", "remote"]}
        async with open_fleet(1, endpoints=["remote"], fallback=chain) as fleet:
            fleet.stubs[0].error = ApiError(500, "broken")
            status, headers, data = await fleet.ask("hello", stream=stream)
            assert status == 200
            assert headers["x-graft-release"] == "remote"
            assert headers["x-graft-fallback"] == "from=champion; why=engine_error"
            text = data.decode() if stream else data["choices"][0]["message"]["content"]
            assert "[base]" in text
            fleet.stubs[0].error = None
            _, headers, _ = await fleet.ask(stream=stream)
            assert headers["x-graft-release"] == RELEASE
            assert "x-graft-fallback" not in headers

    run(main)


@pytest.mark.parametrize(
    ("chain", "release"),
    [
        ({"auto": ["remote"]}, "remote"),
        ({"auto": ["champion", "remote"]}, "remote"),
        ({"auto": ["base"], "champion": ["remote"]}, "remote"),
        ({"auto": ["remote"], "*": ["base"]}, "remote"),
    ],
)
def test_the_chain_of_a_family_holds_for_members_without_one(run, chain, release):
    async def main():
        family = Family(FamilySettings(), main="main", aliases={"main": "champion"})
        routes = Routes(releases=frozenset({RELEASE}), aliases={"champion": RELEASE}, family=family)
        async with open_fleet(1, endpoints=["remote"], routes=routes, fallback=chain) as fleet:
            fleet.stubs[0].error = ApiError(500, "broken")
            _, headers, _ = await fleet.ask(model="auto")
            assert headers["x-graft-release"] == release
            assert headers["x-graft-fallback"] == "from=champion; why=engine_error"

    run(main)


def test_a_model_that_is_not_loaded_yet_is_answered_by_its_chain(run):
    async def main():
        routes = Routes(
            releases=frozenset({RELEASE}), aliases={"champion": RELEASE}, pending={"support": "f" * 16}
        )
        chain = {"support": ["champion"], "legal": ["champion"]}
        async with open_fleet(1, routes=routes, fallback=chain) as fleet:
            _, headers, answer = await fleet.ask(model="support")
            assert headers["x-graft-release"] == RELEASE
            assert headers["x-graft-fallback"] == "from=support; why=model_not_loaded"
            assert answer["model"] == "support"
            _, headers, _ = await fleet.ask(model="legal")
            assert headers["x-graft-fallback"] == "from=legal; why=model_not_found"
            assert (await fleet.ask(model="gpt-4o"))[0] == 404

    run(main)


def test_while_the_engine_is_down_a_remote_endpoint_answers_and_without_one_the_client_retries(run):
    async def main():
        async with open_fleet(1, endpoints=["remote"], fallback={"*": ["base", "remote"]}) as fleet:
            fleet.engines[0].change("down")
            status, headers, _ = await fleet.ask()
            assert (status, headers["x-graft-release"]) == (200, "remote")
            assert headers["x-graft-fallback"] == "from=champion; why=engine_down"
            fleet.engines[1].change("down")
            status, headers, answer = await fleet.ask()
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "engine_down", "1")

    run(main)


def test_a_name_that_only_the_client_knows_reaches_no_header_metric_or_log(run):
    noted = []

    async def main():
        routes = Routes(loaded=False)
        chain = {"*": ["remote"], "gruß; ok": ["remote"]}
        async with open_fleet(1, endpoints=["remote"], routes=routes, fallback=chain) as fleet:
            fleet.gateway.answers.observe = noted.append
            for name in ("a\r\nset-cookie: x", "a b", "é", "x" * 131):
                assert (await fleet.ask(model=name))[0] == 503
            noted.clear()
            for name, shown in (("made-up", "made-up"), ("gruß; ok", "gru?? ok"), ("base", None)):
                status, headers, _ = await fleet.ask(model=name)
                assert status == 200
                if shown:
                    assert headers["x-graft-fallback"].startswith(f"from={shown}; why=")
            metrics = await (await fleet.http.send("GET", "/metrics")).read()
            assert b'model="other",to="remote"' in metrics
            assert b"made-up" not in metrics

    run(main)
    assert [request.model for request in noted if request.release] == ["other", "gruß; ok", "base"]


def test_a_bad_request_is_not_passed_down_the_chain(run):
    async def main():
        async with open_fleet(1, endpoints=["remote"], fallback={"champion": ["remote"]}) as fleet:
            fleet.stubs[0].error = ApiError(400, "too long", param="messages")
            assert (await fleet.ask())[0] == 400
            assert not fleet.stubs[1].asked

    run(main)


# -- start, adapters, end ------------------------------------------------------------------------


def test_one_replica_that_starts_is_enough_and_the_others_are_tried_again(run):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.engines[0].failure = WorkerFailed("no memory")
            await fleet.pool.start()
            while not hasattr(fleet.engines[0], "tried"):
                await asyncio.sleep(0)
            fleet.engines[1].failure = WorkerFailed("no memory either")
            with pytest.raises(WorkerFailed, match="no memory"):
                await fleet.pool.start()
            await fleet.pool.stop()

    run(main)


def test_an_adapter_reaches_replicas_that_were_down_when_it_was_loaded(run):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.engines[1].change("down")
            await fleet.pool.load_adapter("new1new1", "folder")
            assert "new1new1" in fleet.engines[0].models
            assert fleet.engines[1].adapters == {"new1new1": "folder"}
            fleet.engines[1].change("ready")
            async with asyncio.timeout(DEADLINE):
                while "new1new1" not in fleet.engines[1].models:
                    await asyncio.sleep(0)

    run(main)


async def until(condition):
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_replica_that_is_replaced_answers_until_the_new_one_is_ready(run):
    async def main():
        async with open_fleet(2) as fleet:
            ended = asyncio.Event()
            old, new = fleet.pool.replicas
            new.engine.change("starting")
            fleet.pool.retire(old, seconds=DEADLINE, on_end=lambda _name: ended.set())
            for _ in range(3):
                status, headers, _ = await fleet.ask()
                assert (status, served_by(headers)) == (200, "1")
            assert not ended.is_set()
            new.engine.change("ready")
            assert served_by((await fleet.ask())[1]) == "2"
            await until(ended.is_set)
            assert fleet.pool.replicas == [new]
            assert old.engine.state == "stopped"
            assert (await fleet.ask())[0] == 200

    run(main)


def test_a_replica_that_is_wanted_again_before_it_ended_stays(run):
    async def main():
        async with open_fleet(2) as fleet:
            old, new = fleet.pool.replicas
            new.engine.change("starting")
            fleet.pool.retire(old, seconds=DEADLINE, on_end=lambda _name: None)
            await fleet.ask()
            old.retiring = False
            await until(lambda: not fleet.pool._tasks)
            assert fleet.pool.replicas == [old, new]
            assert old.engine.state == "ready"

    run(main)


def test_fewer_replicas_keep_those_that_are_ready_and_free_a_name_when_its_engine_has_ended(run, tmp_path):
    async def main():
        job = EngineJob(folder=str(tmp_path), base_folder="none")
        engines = EngineSet(job, ServeSettings.model_validate({"engine": {"replicas": 2}}))
        down, ready = engines.pool.replicas
        for replica, state in ((down, "down"), (ready, "ready")):
            replica.engine = PooledEngine(None, StubEngine([]))
            replica.engine.change(state)
        down.outstanding = 1
        engines.revise(ServeSettings())
        await until(lambda: engines.pool.replicas == [ready])
        assert set(engines._engines) == {"1", "2"}  # its folder is still in use
        down.outstanding = 0
        await until(lambda: set(engines._engines) == {"2"})
        assert down.engine.state == "stopped"

    run(main)


@pytest.mark.parametrize("launched", [False, True])
def test_a_replica_that_is_not_needed_any_more_while_it_starts_leaves_no_process(run, tmp_path, launched):
    two = ServeSettings.model_validate({"engine": {"replicas": 2}})

    async def main():
        engines = EngineSet(
            EngineJob(folder=str(tmp_path), base_folder="none"),
            ServeSettings(),
            module="stub_engine",
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
            module="stub_engine",
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


def test_endpoints_alone_have_a_state_before_they_are_started(run, tmp_path):
    endpoint = {"url": "http://127.0.0.1:9/v1", "model": "gpt-4o"}
    settings = ServeSettings.model_validate({"failover": {"endpoints": {"large": endpoint}}})

    async def main():
        engines = EngineSet(EngineJob(folder=str(tmp_path), base_folder=""), settings)
        assert not engines.has_base
        assert engines.pool.state == engines.pool.describe()["state"] == "starting"

    run(main)


def test_a_model_is_asked_only_where_it_is_loaded(run):
    async def main():
        async with open_fleet(2) as fleet:
            fleet.stubs[0]._models.remove(OTHER)
            assert {served_by((await fleet.ask(model=OTHER))[1]) for _ in range(6)} == {"2"}

    run(main)


def test_a_draining_gateway_refuses_new_requests_and_finishes_the_running_ones(run):
    async def main():
        async with open_fleet(1) as fleet:
            fleet.stubs[0].open.clear()
            running = asyncio.create_task(fleet.ask())
            while not fleet.stubs[0].asked:
                await asyncio.sleep(0)
            draining = asyncio.create_task(fleet.gateway.answers.drain(DEADLINE))
            await asyncio.sleep(0)
            status, headers, answer = await fleet.ask()
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "stopping", "1")
            status, body = await fleet.http.fetch("GET", "/health")
            assert (status, json.loads(body)["status"]) == (503, "stopping")
            assert not draining.done()
            fleet.stubs[0].open.set()
            assert (await running)[0] == 200
            await draining

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_cancels_the_engine(run, stream):
    async def main():
        async with open_fleet(2, fallback={"champion": ["base"]}) as fleet:
            for stub in fleet.stubs:
                stub.open.clear()
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            while not any(stub.asked for stub in fleet.stubs):
                await asyncio.sleep(0)
            asked = next(stub for stub in fleet.stubs if stub.asked)
            writer.close()
            await asyncio.wait_for(asked.cancelled.wait(), DEADLINE)
            while any(replica.outstanding for replica in fleet.pool.replicas):
                await asyncio.sleep(0)
            assert sum(replica.assigned for replica in fleet.pool.replicas) == 1

    run(main)


def test_in_an_experiment_a_fallback_is_a_failure_of_its_arm_and_a_capture_of_its_own(run):
    async def main():
        split = SplitSettings(share=0.5)
        aliases = {"champion": RELEASE, "challenger": OTHER}
        routes = update_routes(Routes(), aliases=aliases, releases=frozenset({RELEASE, OTHER}), split=split)
        sink = ListSink()
        async with open_fleet(
            1, endpoints=["remote"], routes=routes, sink=sink, fallback={"champion": ["remote"]}
        ) as fleet:
            fleet.stubs[0].error = ApiError(500, "broken")
            _, headers, _ = await fleet.ask(headers=(("x-session-id", "s1"),))
            assert headers["x-graft-release"] == "remote"
            failures = fleet.gateway.answers.metrics.assigned_failures
            assert sum(failures.values()) == 1
        failed, answered = sink.captures
        assert failed.release in (RELEASE, OTHER)
        assert failed.arm is not None
        assert (answered.release, answered.arm) == ("remote", None)
        assert answered.id == headers["x-graft-capture"] != failed.id

    run(main)


def test_requests_that_wait_for_the_only_replica_fall_back_when_it_freezes(run):
    async def main():
        async with open_fleet(1, endpoints=["remote"], fallback={"champion": ["remote"]}) as fleet:
            fleet.stubs[0].open.clear()
            asking = asyncio.create_task(fleet.ask())
            while not fleet.stubs[0].asked:
                await asyncio.sleep(0)
            fleet.engines[0].change("frozen")
            status, headers, _ = await asking
            assert (status, headers["x-graft-release"]) == (200, "remote")

    run(main)


def test_a_client_with_a_tiny_deadline_cannot_open_a_circuit(run):
    async def main():
        async with open_fleet(1, breaker_failures=2, fallback={"champion": ["base"]}) as fleet:
            fleet.stubs[0].open.clear()
            for _ in range(6):
                status, _, _ = await fleet.ask(headers=(("x-request-timeout-ms", "5"),))
                assert status == 504
            fleet.stubs[0].open.set()
            assert fleet.pool.replicas[0].breaker.state == "closed"
            assert (await fleet.ask())[1]["x-graft-release"] == RELEASE

    run(main)


def test_copies_that_fail_feed_neither_the_circuit_breaker_nor_the_retry_budget():
    class Broken:
        state, models = "ready", ("m",)

        async def complete(self, call, *, model):
            raise ConnectionError("gone")

    replica = Replica("1", Broken(), weight=1.0, settings=FailoverSettings(breaker_failures=2))
    pool = ReplicaPool([replica], FailoverSettings(retries=2))
    call = parse_chat_body({"messages": [{"role": "user", "content": "hi"}]}, ServeSettings())
    copy = replace(call, is_copy=True)

    async def main():
        for _ in range(5):
            with pytest.raises(ConnectionError):
                await pool.complete(copy, model="m")

    asyncio.run(main())
    assert (replica.breaker.state, replica.failures, replica.outstanding) == ("closed", 0, 0)
    assert (pool.budget.spent, pool.budget.refused) == (0, 0)
