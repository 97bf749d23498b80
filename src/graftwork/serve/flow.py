"""Growing text to pieces that may be sent: no half characters, nothing from a stop string on.

In: the whole text after each new token. Out: the part that is new and certain. Pure.
"""


class TextFlow:
    """Feed it `push(text)`; it gives the new part. `stopped` is set once a stop string appeared."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._sent = 0
        self._text = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """`text` is everything so far; it replaces what was pushed before."""
        if self.stopped:
            return ""
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.stopped = True
            self._text = text[: min(places)]
            return self._advance(len(self._text))
        self._text = text
        # A character of several tokens shows as U+FFFD until it is whole.
        certain = len(text.rstrip("\ufffd"))
        return self._advance(certain - self._held_back(text[:certain]))

    def finish(self) -> str:
        """What was held back and is certain now."""
        return self._advance(len(self._text))

    def _held_back(self, text: str) -> int:
        """How many last characters could be the beginning of a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )

    def _advance(self, to: int) -> str:
        piece = self._text[self._sent : to]
        self._sent = max(self._sent, to)
        return piece
