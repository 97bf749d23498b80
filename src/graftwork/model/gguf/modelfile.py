"""A Modelfile for Ollama: the merged GGUF file, the chat template in Ollama's language, and how to stop.

In: a chat template. Out: text. Ollama knows no Jinja, so the parts between the texts of a conversation are
found by rendering examples; the result is compared with the template on other conversations. `ADAPTER` is not
used: Ollama refuses it since 0.34.1.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.model.chat.template import ChatTemplate
from graftwork.records.interaction import Message

_SYSTEM, _FIRST, _REPLY, _SECOND = "qsystemq", "qfirstq", "qreplyq", "qsecondq"


class TurnTexts(NamedTuple):
    """What a template writes around the texts of a conversation that ends with a question."""

    opening: str
    """Before the first question where there is no system message."""
    before_system: str
    after_system: str
    after_question: str
    """Up to the place where the model begins to answer."""
    after_reply: str

    def write(self, messages: Sequence[Message]) -> str:
        """The prompt, as the Ollama template below gives it."""
        text = ""
        for place, message in enumerate(messages):
            if message.role == "system":
                text += f"{self.before_system}{message.content}{self.after_system}"
            elif message.role == "user":
                text += f"{'' if place else self.opening}{message.content}{self.after_question}"
            else:
                text += f"{message.content}{self.after_reply}"
        return text

    def to_go(self) -> str:
        """The same as a Go template. Every text is a string literal, whose white space cannot be trimmed."""
        system = f"{_go(self.before_system)}{{{{ .Content }}}}{_go(self.after_system)}"
        opening = f"{{{{ if eq $i 0 }}}}{_go(self.opening)}{{{{ end }}}}"
        question = f"{opening}{{{{ .Content }}}}{_go(self.after_question)}"
        reply = f"{{{{ .Content }}}}{_go(self.after_reply)}"
        return (
            "{{ range $i, $_ := .Messages }}"
            f'{{{{ if eq .Role "system" }}}}{system}'
            f'{{{{ else if eq .Role "user" }}}}{question}'
            f'{{{{ else if eq .Role "assistant" }}}}{reply}'
            "{{ end }}{{ end }}"
        )


def find_turn_texts(template: ChatTemplate) -> TurnTexts | None:
    """None for a template that writes more than fixed texts between turns."""
    plain = _split(template, _user(_FIRST), _reply(_REPLY), _user(_SECOND))
    directed = _split(template, Message(role="system", content=_SYSTEM), _user(_FIRST))
    if plain is None or directed is None:
        return None
    found = TurnTexts(plain[0], directed[0], directed[1], plain[1], plain[2])
    tries = (
        (_user("one"),),
        (Message(role="system", content="be brief"), _user("one"), _reply("two"), _user("three")),
        (_user("one"), _reply("two"), _user("three"), _reply("four"), _user("five")),
    )
    same = all(found.write(messages) == template.prompt_text(messages) for messages in tries)
    return found if same else None


def write_modelfile(template: ChatTemplate, *, gguf: str) -> str:
    lines = [f"FROM ./{gguf}"]
    turns = find_turn_texts(template)
    if turns is not None:
        lines.append(f'TEMPLATE """{turns.to_go()}"""')
    else:
        lines.append(
            "# The chat template has no fixed texts between turns: Ollama takes the one in the file."
        )
    lines += [f"PARAMETER stop {json.dumps(template.end_of_turn)}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"


def _split(template: ChatTemplate, *messages: Message) -> list[str] | None:
    """The texts around the contents; None where a content is missing or changed."""
    rest, parts = template.prompt_text(messages), []
    for message in messages:
        before, found, rest = rest.partition(message.content)
        if not found:
            return None
        parts.append(before)
    return [*parts, rest]


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _reply(text: str) -> Message:
    return Message(role="assistant", content=text)


def _go(text: str) -> str:
    """A Go string literal in an action. A run of three quotes would end the text in the Modelfile."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""
