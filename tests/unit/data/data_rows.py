"""What the tests of the data stage share: rows, a log file, a renderer that needs no model."""

import json
from pathlib import Path
from typing import NamedTuple

from graftwork.records.interaction import Interaction, Message, Origin

THINGS = (
    *("piano", "psaltery", "cello", "drum", "recorder", "ukulele", "clarinet"),
    *("harp", "zither", "banjo", "tuba", "oboe", "lute", "lyre"),
)
# Looks like a token of a code host and is none.
SECRET = "ghp_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5"


class FakeRendered(NamedTuple):
    tokens: tuple[int, ...]
    trained_from: int


class WordRenderer:
    """One token a word: enough to see lengths and the trained span."""

    template_fingerprint = "template-of-words"
    tokenizer_fingerprint = "tokenizer-of-words"

    def render_batch(self, conversations):
        return [self.render(messages, reply) for messages, reply in conversations]

    def count_tokens(self, messages, reply):
        return len(self.render(messages, reply).tokens)

    def render(self, messages, reply):
        prompt = [len(word) for message in messages for word in message.content.split()]
        answer = [len(word) for word in reply.split()] + [0]
        return FakeRendered(tuple(prompt + answer), len(prompt))


def make_row(question, reply="a fine answer", *, line=1, file="log.jsonl", system=None, **more):
    messages = [Message(role="system", content=system)] if system else []
    messages.append(Message(role="user", content=question))
    return Interaction(
        id=f"{file}:{line}",
        origin=Origin(file=file, line=line),
        messages=tuple(messages),
        reply=reply,
        **more,
    )


def chat(question, reply, **more):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": turns, **more}


def write_log(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
