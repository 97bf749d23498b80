"""The text of a reply as it grows: what is certain of it so far, stop strings, and its tool calls."""

import json
from typing import TYPE_CHECKING

from graftwork.engines.protocol import AlternativeData, CallData, GenerateRequest

if TYPE_CHECKING:
    from graftwork.model.chat.tool_form import ToolForm


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
        # The last characters could be the beginning of a mark.
        held_back = max((_overlap(text[:whole], mark) for mark in self._marks), default=0)
        return self._advance(self._certain(text[: whole - held_back]))

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(len(self.text))

    def _certain(self, text: str) -> int:
        if not self._holds:
            return len(text)
        places = [place for mark in self._holds if (place := text.find(mark)) >= 0]
        # White space before a call belongs to the call.
        return len(text[: min(places, default=len(text))].rstrip())

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
        found = None
        if self._form is not None:
            calls = f"{self._opening}{whole}{self._form.behind}" if self._opening else whole
            found = self._form.read(calls)
        if found is None:
            return rest, ()
        made: list[CallData] = [
            {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            for call in found.calls
        ]
        text = found.text.removeprefix(whole[: len(whole) - len(rest)])
        return text, tuple(made if self._parallel else made[:1])


def describe_token(data: bytes, logprob: float) -> AlternativeData:
    # JSON has no infinity; OpenAI writes -9999 for tokens that cannot come.
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def _call_marks(form: "ToolForm | None") -> tuple[str, ...]:
    """Where a call may begin. Text from there on is held back, since it may turn out to be a call."""
    if form is None:
        return ()
    marks = {mark for text in (form.alone, form.before) if text is not None and (mark := text.strip())}
    return tuple(sorted(marks)) if form.alone.strip() else ("{", "[")
