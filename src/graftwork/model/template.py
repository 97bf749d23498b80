"""Messages to tokens by the model's own chat template, with proof of what is trained on.

In: messages and a reply. Out: tokens, and the place from which on they are the reply. Needs only
`tokenizers` and `jinja2`, neither torch nor transformers.

The proof: control tokens come from the template alone. Contents are put in as marks, the template
is rendered, and the text between control tokens is encoded with all special tokens switched off,
so that content which spells `<|im_end|>` stays text and cannot forge a turn. What is trained
decodes to the reply and ends with the end-of-turn token; a row for which that does not hold is
refused.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import BaseLoader
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graftwork.records.errors import EnvironmentLacks, UserMistake
from graftwork.records.interaction import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Rendered:
    tokens: tuple[int, ...]
    trained_from: int


class CannotProve(UserMistake):
    """The trained tokens of a row cannot be shown to be its reply."""


class Template:
    """A base model's chat template and tokenizer."""

    def __init__(self, *, tokenizer_json: str, config: dict[str, Any], chat_template: str) -> None:
        self._tokenizer_json = tokenizer_json
        self._config = config
        self._source = chat_template
        environment = ImmutableSandboxedEnvironment(
            loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(chat_template)

    @classmethod
    def from_folder(cls, folder: Path) -> "Template":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise UserMistake(
                "the base model has no chat template",
                why="without it nobody knows how turns are written for this model",
                fix="use an instruct model, or put a chat_template.jinja into its folder",
                where=str(folder),
            )
        return cls(
            tokenizer_json=(folder / "tokenizer.json").read_text(), config=config, chat_template=source
        )

    @property
    def template_fingerprint(self) -> str:
        special = {k: self._special_name(k) for k in ("bos_token", "eos_token")}
        return hashlib.sha256(json.dumps([self._source, special]).encode()).hexdigest()

    @property
    def tokenizer_fingerprint(self) -> str:
        return hashlib.sha256(self._tokenizer_json.encode()).hexdigest()

    @cached_property
    def eos(self) -> int:
        """The token that ends a turn."""
        return self._special[self._special_name("eos_token")]

    @cached_property
    def _special(self) -> dict[str, int]:
        added = json.loads(self._tokenizer_json)["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"]}

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentLacks(
                "the package tokenizers is not installed",
                fix='pip install "graftwork[train]"',
            ) from error
        tokenizer: Tokenizer = Tokenizer.from_str(self._tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Special tokens are read as plain text: only the template may write them (see `_encode`).
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens up to the place where the model begins to answer."""
        text, contents = self._render(messages, generate=True)
        return self._encode(text, contents)

    def render(self, messages: Sequence[Message], reply: str) -> Rendered:
        """Prompt, reply and end of turn, proven."""
        prompt = self.prompt(messages)
        self._require_plain_turn(messages, reply)
        body = self._tokenizer.encode(reply, add_special_tokens=False).ids
        if self._tokenizer.decode(body, skip_special_tokens=False) != reply:
            raise CannotProve(
                "the reply does not survive the tokenizer",
                why="its tokens decode to another text",
                fix="normalise the text (often a stray control character) or drop the row",
            )
        return Rendered(tokens=(*prompt, *body, self.eos), trained_from=len(prompt))

    def decode(self, tokens: list[int]) -> str:
        """Text of generated tokens, without control tokens."""
        text: str = self._tokenizer.decode([t for t in tokens if t not in self._special_ids])
        return text

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    def _require_plain_turn(self, messages: Sequence[Message], reply: str) -> None:
        """The template writes prompt, reply and end of turn in this order and nothing between."""
        asked = self._substituted(messages, generate=True)
        answered = self._substituted((*messages, Message(role="assistant", content=reply)), generate=False)
        expected = asked + reply + self._special_name("eos_token")
        if not answered.startswith(expected):
            raise CannotProve(
                "the chat template does not write this reply as prompt, reply, end of turn",
                why="trained on it, the model would learn a turn that serving never asks for",
                fix="check the template of the base model, or drop the row",
            )

    def _substituted(self, messages: Sequence[Message], *, generate: bool) -> str:
        text, contents = self._render(messages, generate=generate)
        for mark, content in contents.items():
            text = text.replace(mark, content)
        return text

    def _render(self, messages: Sequence[Message], *, generate: bool) -> tuple[str, dict[str, str]]:
        """The template's text with a mark in place of each content."""
        marks = {f"\ue000{i}\ue001": m.content for i, m in enumerate(messages)}
        if any("\ue000" in content for content in marks.values()):
            raise CannotProve(
                "a message holds the private character U+E000",
                fix="remove it from the row; it has no meaning",
            )
        turns = [{"role": m.role, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        try:
            text = self._template.render(
                messages=turns,
                add_generation_prompt=generate,
                bos_token=self._config.get("bos_token") or "",
                eos_token=self._special_name("eos_token"),
            )
        except TemplateError as error:
            raise CannotProve(
                f"the chat template refuses these messages: {error}",
                fix="check the order and the roles of the turns",
            ) from error
        return text, marks

    def _encode(self, text: str, contents: dict[str, str]) -> list[int]:
        """Control tokens as themselves, everything between them as plain text in one piece."""
        tokens: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self._special:
                tokens.append(self._special[piece])
                continue
            plain = piece
            for mark, content in contents.items():
                plain = plain.replace(mark, content)
            tokens.extend(self._tokenizer.encode(plain, add_special_tokens=False).ids)
        return tokens

    def _special_name(self, key: str) -> str:
        value = self._config.get(key) or ""
        return value["content"] if isinstance(value, dict) else value


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
