"""A stand-in for a small model, used by escalation.py: answers by the number of a question.

Right in 70 %; of the wrong answers 30 % are no JSON. Log-probabilities of right answers are higher on the
whole, and overlap with those of wrong ones. Which question is which is drawn by its number alone.
"""

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from graftwork.process.worker import run_worker
from graftwork.serve.engine_protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    end_with_parent,
    make_handler,
)
from graftwork.serve.http_server import Server

RIGHT, NO_JSON, LARGE_RIGHT = 0.70, 0.30, 0.95


def small_answer(question: str) -> tuple[str, float]:
    """The text and its mean log-probability."""
    chance = random.Random(f"small {question}")
    right = chance.random() < RIGHT
    logprob = min(chance.gauss(-0.35 if right else -0.75, 0.25), -0.001)
    if right:
        return f'{{"answer": "{question}"}}', logprob
    return ("I do not know." if chance.random() < NO_JSON else '{"answer": "wrong"}'), logprob


def token_logprobs(question: str, mean: float, count: int) -> list[float]:
    """Log-probabilities of the tokens, around the mean of the answer: a beginning says less than all."""
    chance = random.Random(f"tokens {question}")
    noise = [chance.gauss(0, 0.1) for _ in range(count)]
    return [mean + each - sum(noise) / count for each in noise]


def large_answer(question: str) -> str:
    right = random.Random(f"large {question}").random() < LARGE_RIGHT
    return f'{{"answer": "{question if right else "wrong"}"}}'


class SmallBackend:
    def __init__(self, models: list[str]) -> None:
        self._models = [BASE, *models]

    def state(self) -> dict[str, Any]:
        return {"models": self._models, "pid": os.getpid()}

    async def load_adapter(self, request: LoadAdapter) -> None:
        self._models = [*self._models, request.name]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        question = request.messages[-1].content
        text, logprob = small_answer(question)
        words = re.findall(r"\S+ ?", text)
        for word, found in zip(words, token_logprobs(question, logprob, len(words)), strict=True):
            token = {"token": word, "logprob": found, "bytes": list(word.encode()), "top_logprobs": []}
            yield ReplyPiece(text=word, logprobs=None if request.logprobs is None else (token,))
            await asyncio.sleep(0)
        yield ReplyPiece(text="", finish_reason="stop", prompt_tokens=40, reply_tokens=len(words))


async def _serve(job: EngineJob) -> None:
    end_with_parent()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = Server(make_handler(SmallBackend(list(job.adapters))))
    await server.listen_unix(str(job.socket))
    await stop.wait()
    await server.close()


if __name__ == "__main__" and len(sys.argv) > 1:
    raise SystemExit(
        run_worker(EngineJob, lambda job: Path(job.folder), lambda job: asyncio.run(_serve(job)))
    )
