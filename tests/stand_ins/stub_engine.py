"""An engine without a model: answers `[model] last question`.

Run as `python -m stub_engine JOB.json`, with this folder in PYTHONPATH.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from graftwork.process.worker import run_worker
from graftwork.serve.engine_handler import make_handler
from graftwork.serve.engine_protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    end_with_parent,
)
from graftwork.serve.http_messages import ApiError
from graftwork.serve.http_server import Server
from graftwork.serve.prompt_releases import PromptReleases


class StubEngine:
    """An EngineBackend. Clear `gate` to pause answers after their first token."""

    def __init__(self, models: list[str]) -> None:
        self._models = [BASE, *models]
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[GenerateRequest] = []
        self.waiting = asyncio.Event()
        """Set while an answer waits for the gate."""
        self.cancelled = asyncio.Event()
        """Set when an answer was given up before its end."""

    def state(self) -> dict[str, Any]:
        return {"models": self._models, "pid": os.getpid()}

    async def load_adapter(self, request: LoadAdapter) -> None:
        if not Path(request.folder).is_dir():
            raise ApiError(400, f"there is no folder {request.folder}")
        self._models = [*self._models, request.name]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        if request.model not in self._models:
            raise ApiError(404, f"the engine does not hold {request.model}")
        self.asked.append(request)
        question = request.prompt if request.prompt is not None else request.messages[-1].content
        tokens = f"[{request.model}] {question}".split(" ")
        allowed = tokens[: request.max_tokens]
        ended = False
        try:
            for position, token in enumerate(allowed):
                yield ReplyPiece(text=token if position == 0 else f" {token}")
                self.waiting.set()
                await self.gate.wait()
            reason = "stop" if len(allowed) == len(tokens) else "length"
            asked = sum(len(message.content.split()) for message in request.messages)
            yield ReplyPiece(text="", finish_reason=reason, prompt_tokens=asked, reply_tokens=len(allowed))
            ended = True
        finally:
            if not ended:
                self.cancelled.set()


def work(job: EngineJob) -> None:
    asyncio.run(_serve(job))


async def _serve(job: EngineJob) -> None:
    end_with_parent()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    prompts = PromptReleases()
    stub = StubEngine(list(prompts.split(job).adapters))
    server = Server(make_handler(stub, prompts))
    await server.listen_unix(str(job.socket))
    await stop.wait()
    await server.close()


if __name__ == "__main__":
    raise SystemExit(run_worker(EngineJob, lambda job: Path(job.folder), work))
