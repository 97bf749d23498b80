"""A teacher without a model: the same question always gets the same answer, in process or over HTTP."""

import hashlib
import json
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from graftwork.engines.endpoint import TryAgain
from graftwork.engines.interface import EngineReply

TEXT = (
    "amber basin cedar delta ember fjord grove harbor inlet juniper kelp lagoon meadow north orchard pebble "
    "quarry ridge summit tundra upland valley willow yarrow zephyr anchor bridge canyon dune estuary"
)
WORDS = TEXT.split()


def answer_to(messages, sample=0):
    """Forty words that depend on every message, so that no two prompts have similar answers."""
    asked = json.dumps([[turn["role"], turn["content"]] for turn in messages])
    chance = random.Random(hashlib.sha256(f"{asked}{sample}".encode()).hexdigest())
    return " ".join(chance.choice(WORDS) for _ in range(40)) + "."


class StandInTeacher:
    """In process. `faults(n)` may raise for the n-th request; `answer(messages, seed)` makes the text."""

    def __init__(self, *, faults=lambda _number: None, answer=None, finish_reason="stop"):
        self.faults = faults
        self.answer = answer or (lambda messages, _seed: answer_to(messages))
        self.finish_reason = finish_reason
        self.requests = 0
        self.asked = Counter()
        self.lock = threading.Lock()

    def ask_once(self, messages, decoding):
        turns = [turn.model_dump() for turn in messages]
        with self.lock:
            self.requests += 1
            number = self.requests
        self.faults(number)
        text = self.answer(turns, decoding.seed)
        with self.lock:
            self.asked[json.dumps([turns, decoding.seed])] += 1
        return EngineReply(text, len(text) // 4, 100, self.finish_reason)


def failing(rate, seed=0):
    """Faults for a share of the requests: each may be answered by the next attempt."""
    chance = random.Random(seed)

    def fault(_number):
        if chance.random() < rate:
            raise TryAgain("status 503")

    return fault


@contextmanager
def teacher_over_http(*, error_rate=0.0, seconds=0.0, seed=0):
    """Yields the URL and the requests that were answered, by prompt."""
    answered = Counter()
    lock, chance = threading.Lock(), random.Random(seed)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            with lock:
                fails = chance.random() < error_rate
                answered[json.dumps(body["messages"])] += not fails
            text = answer_to(body["messages"])
            reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
            reply["usage"] = {"prompt_tokens": 100, "completion_tokens": len(text) // 4}
            data = json.dumps({"error": "busy"} if fails else reply).encode()
            self.send_response(503 if fails else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_more):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", answered
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    with teacher_over_http() as (url, _):
        print(url, flush=True)
        threading.Event().wait()
