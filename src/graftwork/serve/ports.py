"""What serving needs of the outside."""

from typing import Protocol

from graftwork.records.capture import Capture


class CaptureSink(Protocol):
    """Keeps captures for good. Called from one background thread; may be slow, may fail."""

    def add_many(self, captures: list[Capture]) -> None: ...
