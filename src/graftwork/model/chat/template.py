"""Messages to tokens by the model's own chat template, with proof of what is trained on.

Input: messages and a reply. Output: tokens, and the place from which on they are the reply. Needs only
`tokenizers` and `jinja2`, neither torch nor transformers.

The proof: control tokens come only from the template, and the text between them is encoded with all special
tokens switched off, so that content which spells `<|im_end|>` stays text and cannot forge a turn. What is
trained decodes to the reply and ends with the end-of-turn token; a row for which that does not hold is
refused. White space at the edges of the reply is the template's: where it trims it or writes some, as in
serving, what is trained decodes to the reply as the template writes it.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.model.chat.renderer import (
    CannotProve,
    ChatRenderer,
    RenderedTurn,
    SkeletonCache,
    does_not_survive,
    tagged_turn_error,
)
from graftwork.model.chat.tokens import EncodedTexts, TextEncoder
from graftwork.model.shape import read_json_object
from graftwork.records.dataset import RenderedTokens
from graftwork.records.errors import UserError, needs_extra
from graftwork.records.interaction import Message, Role
from graftwork.text.tool_calls import (
    ANY_ARGUMENTS,
    CLOSE,
    OPEN,
    TOOLS_AFTER,
    TOOLS_BEFORE,
    TOOLS_MARK,
    TextAndCalls,
    ToolCall,
    add_tools,
    write_calls,
    write_tools,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from graftwork.model.chat.tool_form import ToolForm

# A chat template that writes tools and calls as rows have them, around one that has no form for calls. Input:
# the source of a template. Output: Jinja source that puts the tools into the system turn and the calls into
# tags, and continues with the template. With it, other servers ask a model as it was trained.
_TEXTS = {
    "$ANY": ANY_ARGUMENTS,
    "$BEFORE": TOOLS_BEFORE,
    "$AFTER": TOOLS_AFTER,
    "$MARK": TOOLS_MARK,
    "$OPEN": OPEN,
    "$CLOSE": CLOSE,
}
_PRELUDE = r"""
{%- set graft = namespace(turns=[], tools="", text="") -%}
{%- for tool in tools or [] -%}
{%- set function = tool.function or tool -%}
{%- set graft.text = '{"type": "function", "function": {"name": ' ~ (function.name | tojson) -%}
{%- if function.description is string -%}
{%- set graft.text = graft.text ~ ', "description": ' ~ (function.description | tojson) -%}
{%- endif -%}
{%- set graft.text = graft.text ~ ', "parameters": ' ~ ((function.parameters or $ANY) | tojson) ~ "}}" -%}
{%- set graft.tools = graft.tools ~ ("\n" if graft.tools else "") ~ graft.text -%}
{%- endfor -%}
{%- if graft.tools -%}{%- set graft.tools = $BEFORE ~ graft.tools ~ $AFTER -%}{%- endif -%}
{%- for message in messages -%}
{%- set graft.text = message.content or "" -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set given = function.arguments if function.arguments is string else function.arguments | tojson -%}
{%- set graft.text = graft.text ~ ("\n" if graft.text else "") ~ $OPEN -%}
{%- set graft.text = graft.text ~ '{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' ~ given ~ "}" -%}
{%- set graft.text = graft.text ~ $CLOSE -%}
{%- endfor -%}
{%- if loop.first and graft.tools and message.role == "system" and $MARK not in graft.text -%}
{%- set graft.text = graft.text ~ ("\n\n" if graft.text else "") ~ graft.tools -%}
{%- elif loop.first and graft.tools and message.role != "system" -%}
{%- set graft.turns = [{"role": "system", "content": graft.tools}] -%}
{%- endif -%}
{%- set turn = message if graft.text == message.content else {"role": message.role, "content": graft.text} -%}
{%- set graft.turns = graft.turns + [turn] -%}
{%- endfor -%}
{%- set messages = graft.turns -%}
"""


Conversation = tuple[Sequence[Message], str]
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A base model's chat template and tokenizer. The end of turn is the control token that the template
    writes after a reply; it need not be the `eos_token` of the configuration (Llama 3 ends a turn with
    `<|eot_id|>`). Without `reasoning`, a template with a switch for it (Qwen 3: `enable_thinking`) renders
    without reasoning, which changes its prompts and its fingerprint.
    """

    CHECKED_EVERY = 1000

    def __init__(
        self, *, tokenizer_json: str, config: dict[str, Any], chat_template: str, reasoning: bool = True
    ) -> None:
        self.tokenizer_json = tokenizer_json
        self._config = config
        self.source = chat_template
        """The template as Jinja source."""
        self._reasoning = reasoning
        self._drafted = 0

    @classmethod
    def from_folder(cls, folder: Path, *, reasoning: bool = True) -> "ChatTemplate":
        config = read_json_object(
            folder / "tokenizer_config.json", states="the special tokens and the template"
        )
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise UserError(
                "the base model has no chat template",
                why="without it the format of turns is unknown for this model",
                fix="use an instruct model, or put a chat_template.jinja into its folder",
                where=str(folder),
            )
        return cls(
            tokenizer_json=(folder / "tokenizer.json").read_text(),
            config=config,
            chat_template=source,
            reasoning=reasoning,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process rebuilds it from the same texts."""
        return ChatTemplate.from_texts, tuple(self.as_texts().values())

    def as_texts(self) -> dict[str, Any]:
        """The arguments of `from_texts` with which another process makes the same template."""
        return {
            "tokenizer_json": self.tokenizer_json,
            "config": json.dumps(self._config),
            "chat_template": self.source,
            "reasoning": self._reasoning,
        }

    @classmethod
    def from_texts(
        cls, tokenizer_json: str, config: str, chat_template: str, reasoning: bool
    ) -> "ChatTemplate":
        return cls(
            tokenizer_json=tokenizer_json,
            config=json.loads(config),
            chat_template=chat_template,
            reasoning=reasoning,
        )

    def without_reasoning(self) -> "ChatTemplate":
        """Return the same template with reasoning switched off."""
        return ChatTemplate.from_texts(**{**self.as_texts(), "reasoning": False})

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What `prompt` encodes, with the control tokens spelled out."""
        return "".join(self._turns.ask(messages))

    @property
    def template_fingerprint(self) -> str:
        special = {k: self._special_name(k) for k in ("bos_token", "eos_token")}
        switches = [self._turns.switches] if self._turns.switches else []
        return hashlib.sha256(json.dumps([self.source, special, *switches]).encode()).hexdigest()

    @property
    def tokenizer_fingerprint(self) -> str:
        return hashlib.sha256(self.tokenizer_json.encode()).hexdigest()

    @property
    def control_tokens(self) -> frozenset[str]:
        """Tokens that only the template may write. In a content they are text, and cannot forge a turn."""
        return frozenset(self._special)

    @property
    def writes_tool_calls(self) -> bool:
        """Whether the template has a form of its own for tool calls that can be read back."""
        return self._turns.own_tool_form is not None

    @property
    def tool_form(self) -> "ToolForm":
        """Return how the model writes tool calls: as its template does, else in tags as rows have them."""
        return self._turns.tool_form

    @cached_property
    def tool_template(self) -> str | None:
        """The template extended by a form for tools and calls. None if it has its own, or if the extended
        template does not render what this one renders.
        """
        if self.writes_tool_calls:
            return None
        tool = {"name": "find", "parameters": {"type": "object"}}
        call = write_calls(TextAndCalls("", (ToolCall("find", {"city": "Bern"}), ToolCall("wait", {}))))
        turns = (("user", "x"), ("assistant", call), ("tool", "y"), ("user", "z"))
        conversation = add_tools([Message(role=role, content=text) for role, text in turns], [tool])
        # Messages without tools and calls reach the template as they are.
        prelude = _PRELUDE.replace("\n", "")
        for name, value in _TEXTS.items():
            prelude = prelude.replace(name, json.dumps(value))
        longer = ChatTemplate.from_texts(**{**self.as_texts(), "chat_template": prelude + self.source})
        with suppress(CannotProve):
            if longer.writes_tool_calls and longer.prompt_text(conversation) == self.prompt_text(
                conversation
            ):
                return longer.source
        return None

    def write_call(self, name: str, arguments: dict[str, Any]) -> str | None:
        """A turn that is one tool call, as the template writes it; None if it cannot."""
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        conversation = (
            Message(role="system", content=write_tools([tool])),
            Message(role="user", content="x"),
        )
        reply = write_calls(TextAndCalls("", (ToolCall(name, arguments),)))
        with suppress(CannotProve):
            return self._turns.answer(conversation, reply).body
        return None

    @property
    def writes_reasoning(self) -> bool:
        """Whether the template knows reasoning in tags of its own."""
        return "think>" in self.source or "reasoning_content" in self.source

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than n times as many characters has more than n
        tokens.
        """
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def eos(self) -> int:
        """The token that ends a turn."""
        if self.end_of_turn not in self._special:
            raise UserError(
                "the chat template ends a turn with no control token",
                why="the model could not say that it is done",
                fix="specify the eos_token in the base model's tokenizer_config.json",
            )
        return self._special[self.end_of_turn]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens up to where the model begins to answer."""
        pieces = self._turns.ask(messages)
        return self._join(pieces, self._segments.encode_for_real(pieces[::2]).tokens).tolist()

    def next_turn(self, role: Role, text: str) -> list[int]:
        """The tokens from after the end of a reply up to the next one, with a message between them."""
        mark = "reply"
        question = Message(role="user", content="x")
        pieces = self._turns.ask(
            (question, Message(role="assistant", content=mark), Message(role=role, content=text))
        )
        index = next((index for index in range(0, len(pieces), 2) if mark in pieces[index]), len(pieces))
        if pieces[index + 1 : index + 2] != [self.end_of_turn]:
            raise tagged_turn_error()
        following = pieces[index + 2 :]
        return self._join(following, self._segments.encode_for_real(following[::2]).tokens).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text without a template; control tokens in it are control tokens."""
        pieces = self._turns.control.split(text)
        tokens = self._join(pieces, self._segments.encode_for_real(pieces[::2]).tokens).tolist()
        bos_token = self._special.get(self._special_name("bos_token"))
        if self._config.get("add_bos_token") is True and bos_token is not None and tokens[:1] != [bos_token]:
            tokens.insert(0, bos_token)
        return tokens

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text on its own, between control tokens."""
        return self._join([text], self._segments.encode_for_real([text]).tokens).tolist()

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; not every token is whole characters."""
        byte_level = (self._definition.get("decoder") or {}).get("type") == "ByteLevel"
        return token_to_bytes(self._tokenizer.id_to_token(token) or "", byte_level=byte_level)

    def render(self, messages: Sequence[Message], reply: str) -> RenderedTokens:
        """Prompt, reply and end of turn, proven: by the template and the tokenizer themselves."""
        draft = self._draft_for_real(messages, reply)
        encoded = self._segments.encode_for_real((*draft.prompt[::2], draft.body), prove=(draft.body,))
        row = self._finish(draft, encoded)
        if isinstance(row, CannotProve):
            raise row
        return RenderedTokens(tokens=tuple(row.tokens), trained_from=row.trained_from)

    def render_batch(self, conversations: Sequence[Conversation]) -> list[RenderedTokens | CannotProve]:
        """Render the rows like `render`, many times as fast; refusals are returned. Tokens are arrays of
        32-bit integers, whose bytes can be put into an Arrow column.
        """
        drafts = [self._draft(messages, reply) for messages, reply in conversations]
        good = [draft for draft in drafts if isinstance(draft, RenderedTurn)]
        texts = {text for draft in good for text in draft.prompt[::2]}
        bodies = {draft.body for draft in good}
        encoded = self._segments.encode(texts | bodies, prove=bodies)
        return [d if isinstance(d, CannotProve) else self._finish(d, encoded) for d in drafts]

    def count_tokens(self, messages: Sequence[Message], reply: str) -> int:
        """Return the number of tokens of a row; for a refused row, that of its texts."""
        (row,) = self.render_batch([(messages, reply)])
        if isinstance(row, CannotProve):
            return sum(map(self.count_text, (*(message.content for message in messages), reply)))
        return len(row.tokens)

    def count_text(self, text: str) -> int:
        """How many tokens a text has on its own between control tokens."""
        return len(self._segments.encode([text]).tokens[text]) // array("i").itemsize

    def decode(self, tokens: list[int]) -> str:
        """Text of generated tokens, without control tokens; tool calls in the form that rows have."""
        return self.read_calls(self.decode_text(tokens))

    def decode_text(self, tokens: list[int]) -> str:
        """Text of generated tokens as the model wrote them, without control tokens."""
        text: str = self._tokenizer.decode([t for t in tokens if t not in self._special_ids])
        return text

    def read_calls(self, text: str) -> str:
        """Return what the model wrote with its tool calls in tags, whatever form its template has."""
        answer = self._turns.tool_form.read(text) if "{" in text else None
        return text if answer is None else write_calls(answer)

    def _draft(self, messages: Sequence[Message], reply: str) -> RenderedTurn | CannotProve:
        """Render the row by a skeleton if there is one for it, else by the template itself."""
        messages = self._turns.fit_roles(messages)
        contents = [message.content for message in messages]
        contents.append(reply)
        roles = (*[message.role for message in messages], "assistant")
        tooled = self._turns.uses_tools(contents)
        skeleton = None if tooled else self._skeletons.find(roles, contents)
        drafted = None
        if skeleton is not None and skeleton.end == self.end_of_turn:
            drafted = skeleton.fill(contents)
            self._drafted += 1
            if self._drafted % self.CHECKED_EVERY != 1:
                return drafted
        try:
            real = self._draft_for_real(messages, reply)
        except CannotProve as refusal:
            self._skeletons.trusted &= drafted is None
            return refusal
        if drafted is not None and real != drafted:
            self._skeletons.trusted = False
        return real

    def _draft_for_real(self, messages: Sequence[Message], reply: str) -> RenderedTurn:
        turn = self._turns.answer(messages, reply)
        if turn.end != self.end_of_turn:
            raise tagged_turn_error()
        return turn

    def _finish(self, draft: RenderedTurn, encoded: EncodedTexts) -> RenderedTokens | CannotProve:
        if draft.body in encoded.lost:
            return does_not_survive()
        tokens = self._join(draft.prompt, encoded.tokens)
        trained_from = len(tokens)
        tokens.frombytes(encoded.tokens[draft.body])
        tokens.append(self.eos)
        return RenderedTokens(tokens=tokens, trained_from=trained_from)

    def _join(self, pieces: list[str], tokens: dict[str, bytes]) -> "array[int]":
        """Control tokens as themselves, everything between them as plain text in one piece."""
        joined = array("i")
        for index, piece in enumerate(pieces):
            if index % 2:
                joined.append(self._special[piece])
            else:
                joined.frombytes(tokens[piece])
        return joined

    @cached_property
    def end_of_turn(self) -> str:
        """The control token that ends a turn, as text."""
        question = (Message(role="user", content="x"),)
        for reply in ("y", "<think>\nr\n</think>\n\ny"):
            with suppress(CannotProve):
                return self._turns.answer(question, reply).end
        return self._special_name("eos_token")

    @cached_property
    def _definition(self) -> dict[str, Any]:
        try:
            return _parse_definition(self.tokenizer_json)
        except (ValueError, RecursionError) as broken:
            raise UserError(
                f"the tokenizer.json of the base model is not JSON: {broken}", fix="fetch the file again"
            ) from broken

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._definition["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"]}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        with needs_extra("train"):
            from tokenizers import Tokenizer
        definition, pre = self.tokenizer_json, self._definition.get("pre_tokenizer") or {}
        spaced = pre.get("type") == "Metaspace" and pre.get("prepend_scheme") == "first"
        if spaced and not self._turns.ask((Message(role="user", content="x"),))[0]:
            # A space is put before the first word; after a control token no word is the first.
            no_prefix = {**pre, "prepend_scheme": "never"}
            definition = json.dumps({**self._definition, "pre_tokenizer": no_prefix})
        return _parse_tokenizer(Tokenizer, definition)

    @cached_property
    def _segments(self) -> TextEncoder:
        return TextEncoder(self._tokenizer, self._definition)

    @cached_property
    def _turns(self) -> ChatRenderer:
        # Without one these two are written as nothing; a template may ask whether the others are defined.
        names = {"bos_token": "", "eos_token": ""}
        names |= {key: name for key in _NAMED if (name := self._special_name(key))}
        return ChatRenderer(self.source, control_tokens=self._special, names=names, reasoning=self._reasoning)

    @cached_property
    def _skeletons(self) -> SkeletonCache:
        return SkeletonCache(self._turns)

    def _special_name(self, key: str) -> str:
        value = self._config.get(key) or ""
        return value["content"] if isinstance(value, dict) else value


@lru_cache(maxsize=1)
def _parse_definition(tokenizer_json: str) -> dict[str, Any]:
    """A process opens one base many times; the definition is only read."""
    definition: dict[str, Any] = json.loads(tokenizer_json)
    return definition


@lru_cache(maxsize=1)
def _parse_tokenizer(library: "type[Tokenizer]", definition: str) -> "Tokenizer":
    tokenizer: Tokenizer = library.from_str(definition)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Special tokens are read as plain text: only the template may write them.
    tokenizer.encode_special_tokens = True
    return tokenizer


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_to_bytes(piece: str, *, byte_level: bool) -> bytes:
    """`piece` is the token as the vocabulary writes it."""
    if byte_level:
        table = _byte_table()
        if all(char in table for char in piece):
            return bytes(table[char] for char in piece)
        return piece.encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


@cache
def _byte_table() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, the others as characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(unprintable)})
    return table
