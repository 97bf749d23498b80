"""A streamed reply whose beginning is read before any of it is sent.

In: the stream of an engine. Out: the same stream, from its first piece on, and what has arrived of it so far.
"""

import asyncio
from contextlib import suppress

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError
from graftwork.serve.serving_engine import ReplyStream


class PrefixReader:
    """Call `read_more` until enough is known, then use it as the stream, or `read_rest` if it is not sent."""

    def __init__(self, stream: ReplyStream, *, hide_logprobs: bool = False) -> None:
        self._stream, self._hide_logprobs = stream, hide_logprobs
        self._held: list[PieceData] = []
        self._reading: asyncio.Task[list[PieceData] | None] | None = None
        self.replica = getattr(stream, "replica", None)
        self.text = ""
        self.logprobs: list[float] = []
        self.tokens = 0
        """Tokens that have arrived; without log-probabilities each piece with text counts as one."""
        self.ended = False

    async def read_more(self, seconds: float | None) -> bool:
        """Wait for the next pieces; False where none came in `seconds`. Raises what the stream raises."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if seconds is not None:
            done, _ = await asyncio.wait({self._reading}, timeout=max(seconds, 0.0))
            if not done:
                return False
        await self._read_on()
        return True

    async def _read(self) -> list[PieceData] | None:
        pieces = await self._stream.next_pieces()
        if pieces is None and not self.ended:
            raise ConnectionError("the reply broke off")
        return None if pieces is None else [self._note(piece) for piece in pieces]

    def _note(self, piece: PieceData) -> PieceData:
        found = [token["logprob"] for token in piece.get("logprobs") or []]
        self.text += piece["text"]
        self.logprobs += found
        self.tokens += len(found) or bool(piece["text"])
        self.ended = self.ended or piece.get("finish_reason") is not None
        if self._hide_logprobs and "logprobs" in piece:
            piece = {**piece}
            piece.pop("logprobs")
        return piece

    async def next_pieces(self) -> list[PieceData] | None:
        if not self._held and not await self._read_on():
            return None
        pieces, self._held = self._held, []
        return pieces

    async def _read_on(self) -> bool:
        """Whether more was read; False at the end of the stream."""
        if self._reading is None:
            pieces = await self._read()
        else:
            reading, self._reading = self._reading, None
            pieces = await reading
        self._held += pieces or []
        return pieces is not None

    async def read_rest(self) -> str | None:
        """The whole text; None where the stream breaks off before its end."""
        with suppress(OSError, ApiError):
            while not self.ended:
                await self._read_on()
            return self.text
        return None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._stream.close()
