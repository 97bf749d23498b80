"""What the data stage needs of the outside: somebody who renders a conversation to tokens."""

from collections.abc import Sequence
from typing import Protocol

from graftwork.records.interaction import Message


class Rendered(Protocol):
    """`tokens[trained_from:]` is the reply and the token that ends its turn."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def trained_from(self) -> int: ...


class Renderer(Protocol):
    """The base model's chat template and tokenizer, and the proof of which ones they are."""

    @property
    def template_fingerprint(self) -> str: ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    def render(self, messages: Sequence[Message], reply: str) -> Rendered: ...
