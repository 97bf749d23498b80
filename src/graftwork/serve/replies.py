"""A reply as it grows: text or tokens in, text, tool calls and log-probabilities out."""

from collections import deque
from typing import TYPE_CHECKING

from graftwork.serve.api.call import AlternativeData, CallData, LogprobData
from graftwork.serve.api.tools import dump_arguments
from graftwork.serve.constrained import GrammarConstraint
from graftwork.serve.engine_protocol import GenerateRequest, ReplyPiece
from graftwork.serve.http_messages import ApiError
from graftwork.serve.request_loop import Ticket
from graftwork.text.tool_calls import TextAndCalls

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.chat.tool_form import ToolForm
    from graftwork.model.generate.constraint import TokenLogprobs


class TextStream:
    """Feed it `push(text)`; it gives the new part. `stopped` is the stop string that appeared first.

    From the first of `holds` on, text is held back until the end.
    """

    def __init__(self, stops: tuple[str, ...], holds: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._holds = holds
        self._marks = (*stops, *holds)
        self._sent = 0
        self.text = ""
        """Everything, up to the stop string."""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """`text` is everything so far; it replaces what was pushed before."""
        if self.stopped is not None:
            return ""
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.stopped = min(places)
            self.text = text[:place]
            return self._advance(self._certain(self.text))
        self.text = text
        # A character of several tokens shows as U+FFFD until it is whole.
        whole = len(text.rstrip("\ufffd"))
        return self._advance(self._certain(text[: whole - self._held_back(text[:whole])]))

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(len(self.text))

    def _certain(self, text: str) -> int:
        if not self._holds:
            return len(text)
        places = [place for mark in self._holds if (place := text.find(mark)) >= 0]
        # White space before a call belongs to the call.
        return len(text[: min(places, default=len(text))].rstrip())

    def _held_back(self, text: str) -> int:
        """How many last characters could be the beginning of a mark."""
        return max((_overlap(text, mark) for mark in self._marks), default=0)

    def _advance(self, to: int) -> str:
        piece = self.text[self._sent : max(to, 0)]
        self._sent = max(self._sent, to)
        return piece


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of the text that the mark begins with; the whole mark does not count."""
    end = text[max(len(text) - len(mark) + 1, 0) :] if mark else ""
    at = end.find(mark[:1]) if end else -1
    while at >= 0:
        if mark.startswith(end[at:]):
            return len(end) - at
        at = end.find(mark[0], at + 1)
    return 0


class ReplyText:
    """The text of a reply to one request: what is certain of it so far, and at the end its tool calls.

    `opening` is the beginning of a call that the prompt holds already: the whole reply is the rest of it.
    """

    def __init__(self, request: GenerateRequest, form: "ToolForm | None", *, opening: str = "") -> None:
        self._form = form if request.tools else None
        self._parallel = request.parallel_tool_calls
        self._opening = opening
        self._flow = TextStream(request.stop, ("",) if opening else _call_marks(self._form))

    @property
    def stopped(self) -> str | None:
        return self._flow.stopped

    @property
    def text(self) -> str:
        return self._flow.text

    def push(self, text: str) -> str:
        """`text` is everything so far. The new part that can be sent."""
        return self._flow.push(text)

    def finish(self, unsent: str = "") -> tuple[str, tuple[CallData, ...]]:
        """The text that is not sent yet, and the calls. `unsent` was given out and not sent."""
        rest = unsent + self._flow.finish()
        whole = self._flow.text
        found = None if self._form is None else self._read(whole)
        if found is None:
            return rest, ()
        made: list[CallData] = [
            {"name": call.name, "arguments": dump_arguments(call.arguments)} for call in found.calls
        ]
        text = found.text.removeprefix(whole[: len(whole) - len(rest)])
        return text, tuple(made if self._parallel else made[:1])

    def _read(self, whole: str) -> TextAndCalls | None:
        assert self._form is not None
        return self._form.read(f"{self._opening}{whole}{self._form.behind}" if self._opening else whole)


class GrowingReply:
    """Decodes tokens, stops, and emits what is certain."""

    def __init__(
        self,
        ticket: Ticket,
        request: GenerateRequest,
        template: "ChatTemplate",
        *,
        prompt_tokens: int,
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.ticket, self.constraint = ticket, constraint
        self.noted_logprobs: deque[TokenLogprobs] = deque()
        self._request, self._template = request, template
        self._prompt_tokens = prompt_tokens
        self._flow = ReplyText(request, template.tool_form if request.tools else None)
        self._tokens: list[int] = []
        self._unsent = ""
        self._logprobs: list[LogprobData] = []

    def take(self, token: int) -> bool:
        """One more token; False ends the reply."""
        if self.ticket.cancelled:
            return False
        self._tokens.append(token)
        request = self._request
        if request.logprobs is not None:
            self._logprobs.append(self._describe(token, self.noted_logprobs.popleft()))
        if request.stream or request.stop:
            self._unsent += self._flow.push(self._decode())
            if self._flow.stopped is not None:
                self.finish("stop")
                return False
        if request.stream and self._unsent:
            self.ticket.emit(ReplyPiece(text=self._unsent, logprobs=self._take_logprobs()))
            self._unsent = ""
        return True

    def finish(self, reason: str) -> None:
        """Emit the last piece."""
        if self.constraint is not None and self.constraint.error:
            message = f"the schema needs more work than is allowed for a token: {self.constraint.error}"
            self.ticket.fail(ApiError(400, message, param="response_format", code="unsupported_schema"))
            return
        if self._flow.stopped is None:
            self._unsent += self._flow.push(self._decode())
        text, calls = self._flow.finish(self._unsent)
        self.ticket.emit(
            ReplyPiece(
                text=text,
                finish_reason=reason,
                prompt_tokens=self._prompt_tokens,
                reply_tokens=len(self._tokens),
                tool_calls=calls,
                logprobs=self._take_logprobs(),
                stop=self._flow.stopped,
                queue_ms=self.ticket.queue_ms,
            )
        )

    def _decode(self) -> str:
        return self._template.decode_text(self._tokens)

    def _take_logprobs(self) -> tuple[LogprobData, ...] | None:
        if self._request.logprobs is None:
            return None
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def _describe(self, token: int, noted: "TokenLogprobs") -> LogprobData:
        top = [self._alternative(other, value) for other, value in noted.top]
        return {**self._alternative(token, noted.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> AlternativeData:
        return describe_token(self._template.token_bytes(token), logprob)


def describe_token(data: bytes, logprob: float) -> AlternativeData:
    # JSON has no infinity; OpenAI writes -9999 for tokens that cannot come.
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def _call_marks(form: "ToolForm | None") -> tuple[str, ...]:
    """Where a call may begin. Text from there on is held back, since it may turn out to be a call."""
    if form is None:
        return ()
    marks = {mark for text in (form.alone, form.before) if text is not None and (mark := text.strip())}
    return tuple(sorted(marks)) if form.alone.strip() else ("{", "[")
