"""The system prompt that a row is trained with: given by graft.yaml, logged, or both.

In: the turns of a row and the role of its agent. Out: the turns, with one system turn in front where
a prompt is given. Does not know how turns are rendered.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Message
from graftwork.text.publish import publish_text

# The definitions of tools as the reading writes them behind the system prompt.
_TOOLS = re.compile(
    r"# Tools\n\n[^\n]*\n\n[^\n]*\n<tools>\n.*?\n</tools>\n\n[^\n]*\n<tool_call>.*?</tool_call>", re.DOTALL
)


@lru_cache(maxsize=256)
def _without_secrets(prompt: str) -> str:
    """The same prompt stands before many rows."""
    return publish_text(prompt)


def give_system_prompt(
    messages: Sequence[Message], *, role: str | None, settings: DataSettings
) -> tuple[Message, ...]:
    """The turns with the prompt of their role, else with the one for all, else as they were logged.

    An empty prompt is given too: it takes the logged one away.
    """
    given = settings.system_prompts.get(role) if role is not None else None
    if given is None:
        given = settings.system_prompt
    if given is None:
        return tuple(messages)
    # It is trained on and sent to whoever is evaluated, as the rows are: without secrets, as they are.
    parts = [_without_secrets(given) if settings.redact else given]
    if settings.logged_system_prompt == "keep_behind":
        parts += [message.content for message in messages if message.role == "system"]
    else:
        # The tools that could be called are no part of the prompt: without them the calls make no sense.
        parts += [
            block for turn in messages if turn.role == "system" for block in _TOOLS.findall(turn.content)
        ]
    text = "\n\n".join(part for part in parts if part)
    rest = tuple(message for message in messages if message.role != "system")
    return (Message(role="system", content=text), *rest) if text else rest
