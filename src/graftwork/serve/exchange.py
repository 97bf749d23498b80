"""One exchange while it runs: what the gateway knows of it, and what of that is kept.

In: a checked call, then the pieces of the answer. Out: headers, and the Exchange for the captures. Knows no
sockets.
"""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from graftwork.serve.capture import Exchange
from graftwork.serve.messages import Headers
from graftwork.serve.openai_api import AnswerHead, ChatCall, ChunkEncoder
from graftwork.serve.routes import Routes
from graftwork.serve.split import Lot


@dataclass(slots=True)
class Running:
    """What is known of one exchange while it runs."""

    call: ChatCall
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    lot: Lot | None = None
    """Who answers was drawn; None where it was not."""
    asked: bool = False
    """Whether the engine was asked: if not, it is not the release's fault that there is no answer."""
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    disconnected: bool = False

    def headers(self, *, captured: bool) -> Headers:
        release = ("x-graft-release", self.head.release)
        return (release, ("x-graft-capture", self.capture_id)) if captured else (release,)

    def note_end(self, piece: dict[str, Any]) -> None:
        self.finish_reason = piece["finish_reason"]
        self.prompt_tokens = piece["prompt_tokens"]
        self.reply_tokens = piece["reply_tokens"]

    def encode_piece(self, encoder: ChunkEncoder, piece: dict[str, Any]) -> bytes:
        out = b""
        if piece["text"]:
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
            self.texts.append(piece["text"])
            out = encoder.text(piece["text"])
        if piece.get("finish_reason") is not None:
            self.note_end(piece)
            out += encoder.ending(piece["finish_reason"])
        return out

    def to_exchange(self, elapsed: float) -> Exchange:
        first = self.first_token_at
        return Exchange(
            id=self.capture_id,
            at=self.at,
            session=self.session,
            model=self.call.model,
            release=self.head.release,
            request=self.call.body,
            reply="".join(self.texts),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            reply_tokens=self.reply_tokens,
            first_token_ms=None if first is None else (first - self.started) * 1000,
            total_ms=elapsed * 1000,
            disconnected=self.disconnected,
            lot=self.lot,
        )


def begin(call: ChatCall, *, routes: Routes, session: str | None) -> Running:
    """Find who answers, by lot where there is an experiment. Raises ApiError where nobody can."""
    unique = uuid.uuid4().hex
    now = time.time()
    release, deal, lot = routes.resolve(call.model), routes.deal, None
    if deal is not None and call.model == deal.alias:
        # Who names no session is dealt one of his own.
        lot = Lot(deal.experiment, deal.draw(session or unique), deal.share)
        release = deal.release_of(lot.arm)
    head = AnswerHead(id=f"chatcmpl-{unique}", created=int(now), model=call.model, release=release)
    return Running(
        call=call,
        head=head,
        capture_id=unique,
        session=session,
        started=time.perf_counter(),
        at=now,
        lot=lot,
    )
