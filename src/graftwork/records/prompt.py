"""A prompt that stands in for an adapter: an instruction and worked examples before each request.

Shared by evaluation, which measures it, releases, which carry it as `prompt.json`, and serving.
"""

from collections.abc import Sequence

from graftwork.records.base import Record
from graftwork.records.interaction import Message

PROMPT_FILE = "prompt.json"
TOOLS = "<tools>"
"""What a system turn with tool definitions holds: such a turn is never replaced."""


class PromptVariant(Record):
    """What is put before the messages of a request. An empty one changes nothing."""

    instruction: str | None = None
    """The system prompt in place of the request's own; None keeps that."""
    examples: tuple[Message, ...] = ()
    """Questions and replies of training rows, right behind the system turns."""
    rows: tuple[str, ...] = ()
    """The training rows that the examples are."""
    optimizer: str = ""
    """Who wrote the instruction; empty where it is the project's own."""

    def apply(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if self.instruction is not None:
            messages = replace_system(messages, self.instruction)
        opening = next((at for at, turn in enumerate(messages) if turn.role != "system"), len(messages))
        return (*messages[:opening], *self.examples, *messages[opening:])


def replace_system(messages: Sequence[Message], instruction: str) -> tuple[Message, ...]:
    """The messages with this system prompt instead of their own; tool definitions stay behind it."""
    tools = [turn.content for turn in messages if turn.role == "system" and TOOLS in turn.content]
    text = "\n\n".join(part for part in (instruction, *tools) if part)
    rest = tuple(turn for turn in messages if turn.role != "system")
    return (Message(role="system", content=text), *rest) if text else rest
