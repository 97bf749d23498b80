"""Escalation as predicted and as served: rate, quality and cost of 1,000 requests against their intervals.

Run: python benchmarks/escalation.py [--requests 1000] [--stream]. The gateway, the checks, the threshold and
the upstream engine are the real ones; both models are stand-ins that answer by the number of a question
(standin_small.py). The threshold is chosen on 300 questions and the forecast made on 300 others; the requests
are new ones. With --stream the requests are streams that are judged by their first two tokens.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from results import save_results
from standin_small import large_answer, small_answer

from graftwork.evaluate.escalation_curve import LiveRequest, PairedCase, compare_live, make_curve
from graftwork.model.base import find_base
from graftwork.pipeline.ask_endpoint import EndpointQuestions, ServedAnswer, ask_endpoint
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.records.routing import EscalationForecast, EscalationOption, MeasuredShare
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.escalation import PrefixVerdict
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings
from graftwork.text.json_prefix import read_json_prefix

SMALL_USD, LARGE_USD = 0.00002, 0.004
"""An answer of each model."""
MAX_RATE = 0.3
PREFIX_TOKENS = 2
RELEASE = "a" * 64


class LargeHandler(BaseHTTPRequestHandler):
    """The large model's API."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "large-1", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = large_answer(body["messages"][-1]["content"])
        usage = {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            self._send({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        chunks = [{"choices": [delta]}, {"choices": [end]}, {"choices": [], "usage": usage}]
        shown = [json.dumps({"id": "x", "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
        data = "".join(f"data: {line}\n\n" for line in (*shown, "[DONE]")).encode()
        self._write("text/event-stream", data)

    def _send(self, value: dict[str, Any]) -> None:
        self._write("application/json", json.dumps(value).encode())

    def _write(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_words: object) -> None:
        pass


class IsJson:
    """The project's check."""

    def judge_prefix(self, _messages: object, text: str) -> PrefixVerdict:
        failing = None if read_json_prefix(text) is not None else "json_valid"
        return PrefixVerdict(failing, is_open=failing is None)

    def find_failing(self, _messages: object, text: str) -> str | None:
        try:
            json.loads(text)
        except ValueError:
            return "json_valid"
        return None


def make_cases(first: int, count: int) -> list[Case]:
    return [
        Case(
            id=str(number),
            origin=Origin(file="made", line=1),
            messages=(Message(role="user", content=f"question {number}"),),
            reference="",
        )
        for number in range(first, first + count)
    ]


def is_right(case: Case, text: str) -> float:
    return float(text == f'{{"answer": "{case.messages[-1].content}"}}')


@contextmanager
def serving(folder: Path, settings: ServeSettings) -> Iterator[str]:
    """The real gateway in a thread, over the stand-in engine in a process of its own."""
    ready, stop_from, urls = threading.Event(), [], []

    async def main() -> None:
        stop = asyncio.Event()
        stop_from.append((asyncio.get_running_loop(), stop))

        def note(url: str) -> None:
            urls.append(url)
            ready.set()

        base = find_base("smollm2-135m-instruct", project_folder=folder).folder  # for its chat template
        job = EngineJob(folder=str(folder), base_folder=base, adapters={RELEASE: "none"})
        project = ServedProject(resolve_aliases=lambda: {"champion": RELEASE}, checks=IsJson())
        await serve(
            settings, engine_job=job, project=project, on_ready=note, stop=stop, engine_module="standin_small"
        )

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield urls[0]
    finally:
        loop, stop = stop_from[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def settings_of(url: str, threshold: float | None, *, stream: bool = False) -> ServeSettings:
    failover = {"endpoints": {"large": {"url": url, "model": "large-1"}}}
    escalate = None
    if threshold is not None:
        escalate = {
            "to": "large", "checks": ["json_valid"], "min_logprob": threshold,
            "per_minute": None, "per_day": None,
            "stream": "prefix" if stream else "hold", "prefix_tokens": PREFIX_TOKENS,
        }  # fmt: skip
    return ServeSettings.model_validate(
        {"port": 0, "failover": failover, "escalate": escalate, "capture": False}
    )


def pair_up(cases: list[Case], answers: list[ServedAnswer], *, stream: bool) -> list[PairedCase]:
    check, first = IsJson(), PREFIX_TOKENS if stream else None

    def fails(answer: ServedAnswer) -> bool:
        if first is None or len(answer.tokens) <= first:
            return check.find_failing((), answer.text) is not None
        return check.judge_prefix((), answer.beginning(first)).failing is not None

    return [
        PairedCase(
            session=case.id,
            logprob=answer.mean_logprob_of(first),
            small=is_right(case, answer.text),
            large=is_right(case, large_answer(case.messages[-1].content)),
            small_cost=SMALL_USD,
            large_cost=LARGE_USD,
            fails=fails(answer),
        )
        for case, answer in zip(cases, answers, strict=True)
    ]


def forecast(validation: list[PairedCase], test: list[PairedCase]) -> EscalationForecast:
    curve = make_curve(validation, test, max_rate=MAX_RATE)
    everything = MeasuredShare(value=1.0, low=1.0, high=1.0, n=len(test))
    alone = EscalationOption(checks=(), escalated=everything, quality=everything, cost_per_1000=None)
    return EscalationForecast(
        small="champion", large="large", metric="right", cases=len(test), chosen=alone, options=(alone,),
        large_alone=alone, gain_over_small=0, gain_low=0, gain_high=0, loss_to_large=0, loss_low=0,
        loss_high=0, curve=curve,
    )  # fmt: skip


async def ask_streamed(url: str, cases: list[Case]) -> list[ServedAnswer]:
    """The answers as streams."""
    client, room = Client(port=int(url.rpartition(":")[2])), asyncio.Semaphore(8)

    async def ask(case: Case) -> ServedAnswer:
        body = {
            "model": "champion",
            "messages": [message.model_dump() for message in case.messages],
            "max_tokens": 32,
            "stream": True,
        }
        started = time.perf_counter()
        async with room:
            reply = await client.send(
                "POST",
                "/v1/chat/completions",
                body=json.dumps(body).encode(),
                headers=(("content-type", "application/json"),),
            )
            lines = (await reply.read()).decode().splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
        return ServedAnswer(case.id, reply.status, text, time.perf_counter() - started, dict(reply.headers))

    try:
        return list(await asyncio.gather(*map(ask, cases)))
    finally:
        client.close()


def wait_for_large(ask: Callable[[list[Case]], list[ServedAnswer]]) -> None:
    """Until the upstream engine is ready: the first escalations would be lost otherwise."""
    bad = [c for c in make_cases(10**6, 200) if IsJson().find_failing((), small_answer(_text(c))[0])][:1]
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if "large answered" in ask(bad)[0].headers.get("x-graft-escalation", ""):
            return
        time.sleep(0.2)
    raise SystemExit("the large model was never ready")


def _text(case: Case) -> str:
    return case.messages[-1].content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--stream", action="store_true", help="Streams that are judged by their beginning.")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, sys.path))
    large = ThreadingHTTPServer(("127.0.0.1", 0), LargeHandler)
    threading.Thread(target=large.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{large.server_address[1]}/v1"
    questions = EndpointQuestions("champion", 32, at_once=8)
    with tempfile.TemporaryDirectory() as folder:
        validation, test = make_cases(0, 300), make_cases(300, 300)
        with serving(Path(folder), settings_of(url, None)) as endpoint:
            answers = ask_endpoint(endpoint, [*validation, *test], questions._replace(logprobs=True))
        predicted = forecast(
            pair_up(validation, answers[: len(validation)], stream=asked.stream),
            pair_up(test, answers[len(validation) :], stream=asked.stream),
        )
        assert predicted.curve is not None
        threshold = predicted.curve.chosen.threshold
        new = make_cases(10_000, asked.requests)
        with serving(Path(folder), settings_of(url, threshold, stream=asked.stream)) as endpoint:
            wait_for_large(lambda cases: ask_endpoint(endpoint, cases, questions))
            if asked.stream:
                served = asyncio.run(ask_streamed(endpoint, new))
            else:
                served = ask_endpoint(endpoint, new, questions)
    assert all(answer.answered for answer in served)
    requests = []
    for case, answer in zip(new, served, strict=True):
        escalated = answer.headers.get("x-graft-release") == "large"
        cost = SMALL_USD + LARGE_USD * escalated
        requests.append(LiveRequest(case.id, escalated, is_right(case, answer.text), cost))
    live = compare_live(predicted, requests)
    figures = {
        "threshold": threshold,
        "auc": predicted.curve.auc,
        "requests": len(requests),
        "prefix_tokens": PREFIX_TOKENS if asked.stream else None,
        "no_json_sent": sum(IsJson().find_failing((), answer.text) is not None for answer in served),
        "figures": [figure.model_dump(mode="json") for figure in live.figures],
        "live_value_within_predicted_interval": {
            figure.name: (figure.predicted_low or 0)
            <= (figure.live or 0)
            <= (figure.predicted_high or math.inf)
            for figure in live.figures
        },
    }
    print(json.dumps(figures, indent=2))
    print(save_results("escalation_stream" if asked.stream else "escalation", figures))
    large.shutdown()


if __name__ == "__main__":
    main()
