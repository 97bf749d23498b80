"""What the data stage needs of the outside: somebody who renders a conversation to tokens."""

from collections.abc import Callable, Sequence
from typing import Protocol

from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message

Progress = Callable[[str, int, int], None]
"""Who is told how it goes: the phase, how much of it is done, how much there is."""


class Rendered(Protocol):
    """`tokens[trained_from:]` is the reply and the token that ends its turn."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def trained_from(self) -> int: ...


class Renderer(Protocol):
    """The base model's chat template and tokenizer, and the proof of which ones they are.

    It can be pickled, so that each process of a pool has its own.
    """

    @property
    def template_fingerprint(self) -> str: ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    @property
    def control_tokens(self) -> frozenset[str]:
        """What only the template may write: in a content it would forge a turn."""
        ...

    @property
    def writes_reasoning(self) -> bool:
        """Whether the template knows reasoning in tags of its own."""
        ...

    def render(self, messages: Sequence[Message], reply: str) -> Rendered:
        """One row, or a UserMistake that says why its mask cannot be proven."""
        ...

    def render_batch(
        self, conversations: Sequence[tuple[Sequence[Message], str]]
    ) -> Sequence[Rendered | UserMistake]:
        """The same for many rows at once; a row that is refused has its refusal in its place.

        The tokens support the buffer protocol as 32-bit integers where that is quicker than tuples.
        """
        ...

    def count_tokens(self, messages: Sequence[Message], reply: str) -> int:
        """How many tokens the row has."""
        ...
