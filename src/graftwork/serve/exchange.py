"""One exchange while it runs: the checked call, who answers it, and what its answer was so far.

Out: what the capture, the metrics and the logs need of it when it ends.
"""

import time
import uuid
from dataclasses import dataclass, field

from graftwork.serve.api.call import (
    NO_TOKENS,
    AnswerHead,
    ApiFormat,
    ChatCall,
    PieceData,
    TokenUsage,
    describe_reply,
)
from graftwork.serve.budgets import estimate_tokens
from graftwork.serve.captures import ServedExchange
from graftwork.serve.choices import count_usage
from graftwork.serve.http_messages import Headers
from graftwork.serve.keys import ANYONE, KeyHolder
from graftwork.serve.request_log import CLIENT_LEFT, FinishedRequest
from graftwork.serve.routing import ArmAssignment, Routes, choose_release


@dataclass(slots=True)
class RunningExchange:
    """What is known of one exchange while it runs."""

    call: ChatCall
    api: ApiFormat
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    assignment: ArmAssignment | None = None
    key: KeyHolder = ANYONE
    asked: bool = False
    """Whether the engine was asked. If not, a missing answer is not the fault of the release."""
    texts: list[str] = field(default_factory=list)
    endings: list[PieceData] = field(default_factory=list)
    """The last pieces of the choices that ended."""
    first_token_at: float | None = None
    finish_reason: str | None = None
    usage: TokenUsage = NO_TOKENS
    disconnected: bool = False
    queue_seconds: float | None = None
    body_bytes: int = 0
    path: str = ""
    traceparent: str | None = None
    route: str = ""
    """The member of the family that answers, and why; for the response header."""

    def headers(self, *, captured: bool) -> Headers:
        headers: Headers = (("x-graft-release", self.head.release),)
        if self.route:
            headers += (("x-graft-route", self.route),)
        return (*headers, ("x-graft-capture", self.capture_id)) if captured else headers

    def note(self, piece: PieceData) -> None:
        """Keep what the capture and the metrics need. Of several choices the first one is captured."""
        if self.first_token_at is None and piece["text"]:
            self.first_token_at = time.perf_counter()
        is_first = piece.get("index", 0) == 0
        if is_first:
            self.texts.append(piece["text"])
        if piece.get("finish_reason") is not None:
            self.endings.append(piece)
            if (waited := piece.get("queue_ms")) is not None:
                self.queue_seconds = waited / 1000
            self.usage = count_usage(self.call, self.endings)
            if is_first:
                self.finish_reason = piece["finish_reason"]
                if calls := piece.get("tool_calls"):
                    self.texts = [describe_reply("".join(self.texts), calls)]

    @property
    def ended(self) -> bool:
        return len(self.endings) == self.call.choices

    def count_tokens(self) -> int:
        """The tokens that count against the budget; estimated for an answer that broke off."""
        if self.ended or not self.asked:
            return sum(self.usage)
        prompt = sum(len(message["content"]) for message in self.call.messages)
        return max(sum(self.usage), estimate_tokens(prompt) + len(self.texts))

    def to_finished(self, elapsed: float) -> FinishedRequest:
        first = self.first_token_at
        return FinishedRequest(
            at=self.at,
            seconds=elapsed,
            method="POST",
            path=self.path,
            status=CLIENT_LEFT if self.disconnected else 200,
            key=self.key.name,
            model=self.head.model,
            release=self.head.release,
            capture=self.capture_id,
            prompt_tokens=self.usage.prompt,
            reply_tokens=self.usage.reply,
            first_token_seconds=None if first is None else first - self.started,
            queue_seconds=self.queue_seconds,
            finish_reason=self.finish_reason,
            stream=self.call.stream,
            max_tokens=self.call.max_tokens,
            temperature=self.call.temperature,
            traceparent=self.traceparent,
        )

    def to_exchange(self, elapsed: float) -> ServedExchange:
        first = self.first_token_at
        return ServedExchange(
            id=self.capture_id,
            at=self.at,
            session=self.session,
            model=self.call.model,
            release=self.head.release,
            request=self.call.body,
            reply="".join(self.texts),
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.prompt,
            reply_tokens=self.usage.reply,
            first_token_ms=None if first is None else (first - self.started) * 1000,
            total_ms=elapsed * 1000,
            disconnected=self.disconnected,
            assignment=self.assignment,
            user=self.call.user,
            size=self.body_bytes + sum(map(len, self.texts)),
        )


def begin_exchange(call: ChatCall, *, api: ApiFormat, routes: Routes, session: str | None) -> RunningExchange:
    unique = uuid.uuid4().hex
    now = time.time()
    # A request without a session id is a session of its own.
    release, assignment = choose_release(routes, call.model, session=session or unique)
    head = AnswerHead(unique=unique, created=int(now), model=call.model, release=release)
    return RunningExchange(
        call=call,
        api=api,
        head=head,
        capture_id=unique,
        session=session,
        started=time.perf_counter(),
        at=now,
        assignment=assignment,
    )
