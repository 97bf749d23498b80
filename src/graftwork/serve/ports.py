"""What serving needs of the outside."""

from typing import Protocol

from graftwork.records.interaction import Capture, Feedback


class CaptureSink(Protocol):
    """Keeps captures for good. Called from one background thread; may be slow, may fail."""

    def add_many(self, captures: list[Capture]) -> None: ...


class FeedbackBook(Protocol):
    """Keeps what users say of answers. Called from several threads; may be slow, may fail."""

    def add_feedback(self, feedback: Feedback) -> bool:
        """Keep it for good; False where there is no such capture (yet)."""
        ...
