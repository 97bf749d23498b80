"""Several choices of one request: each is a request of its own to the engine, and all run at once."""

import asyncio
from collections.abc import Iterable

from graftwork.engines.protocol import PieceData
from graftwork.serve.api.call import ChatCall, TokenUsage
from graftwork.serve.serving_engine import ReplyStream, ServingEngine


async def complete_choices(engine: ServingEngine, call: ChatCall, *, model: str) -> list[PieceData]:
    """One whole piece for each choice. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(engine.complete(single, model=model)) for single in call.fan_out()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def stream_choices(engine: ServingEngine, call: ChatCall, *, model: str) -> "ReplyStream":
    calls = call.fan_out()
    if len(calls) == 1:
        return await engine.stream(calls[0], model=model)
    tasks = [asyncio.create_task(engine.stream(single, model=model)) for single in calls]
    try:
        return MergedStream(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close)
        raise


def _close(starting: "asyncio.Task[ReplyStream]") -> None:
    """Its answer has begun, but nobody wants it: another choice was refused, or the client has left."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class MergedStream:
    """A ReplyStream whose pieces carry the index of their choice."""

    def __init__(self, streams: list[ReplyStream]) -> None:
        self._streams = streams
        self._reading: dict[asyncio.Task[list[PieceData] | None], int] = {}
        self._begun = False

    async def next_pieces(self) -> list[PieceData] | None:
        if not self._begun:
            self._begun = True
            for place in range(len(self._streams)):
                self._read(place)
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            found: list[PieceData] = []
            for task in done:
                place = self._reading.pop(task)
                pieces = task.result()
                if pieces is not None:
                    found += [{**piece, "index": place} for piece in pieces]
                    self._read(place)
            if found:
                return found
        return None

    def _read(self, place: int) -> None:
        task = asyncio.create_task(self._streams[place].next_pieces())
        self._reading[task] = place

    def close(self) -> None:
        for task in self._reading:
            task.cancel()
        for stream in self._streams:
            stream.close()


def count_usage(call: ChatCall, endings: Iterable[PieceData]) -> TokenUsage:
    """The tokens of all choices; a prompt counts once, however many choices it has."""
    n = call.options.n if call.options is not None else 1
    prompt = reply = 0
    for piece in endings:
        if piece.get("index", 0) % n == 0:
            prompt += piece["prompt_tokens"]
        reply += piece["reply_tokens"]
    return TokenUsage(prompt, reply)
