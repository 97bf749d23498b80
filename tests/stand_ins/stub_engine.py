"""An engine without a model: answers `[model] last question`.

Run as `python -m stub_engine JOB.json`, with this folder in PYTHONPATH.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from graftwork.engines.process import run_engine
from graftwork.engines.protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
)
from graftwork.http.messages import ApiError


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
        return {"models": self._models, "pid": os.getpid(), "waiting": 0, "answered": len(self.asked)}

    async def load_adapter(self, request: LoadAdapter) -> None:
        if not Path(request.folder).is_dir():
            raise ApiError(400, f"there is no folder {request.folder}")
        self._models = [*self._models, request.name]

    async def close(self) -> None: ...

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


async def _start(job: EngineJob) -> StubEngine:
    return StubEngine(list(job.adapters))


if __name__ == "__main__":
    raise SystemExit(run_engine(_start))
