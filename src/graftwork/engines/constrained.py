"""Constrained decoding: a JSON Schema, or the tools that must be called, to the tokens that may come next.

Grammars are compiled by llguidance with limits on their size and on the work of each step, so that neither a
schema nor its regular expressions can stop the engine. What llguidance cannot enforce is refused by name.
"""

import asyncio
import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.http.messages import ApiError

if TYPE_CHECKING:
    import llguidance
    from torch import Tensor

    from graftwork.engines.protocol import GenerateRequest
    from graftwork.model.chat.template import ChatTemplate

_WHITESPACE = r"(\n[ \t]{0,24}| )?"
"""Compact or indented JSON; a small model that may write any white space can continue with it forever."""
FREE_LAYOUT = {"whitespace_pattern": _WHITESPACE}
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it. The llguidance inside llama.cpp knows no pattern for white space."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data and no schemas."""
_KEPT_CHARACTERS = 256 * 1024
"""Total characters of grammars that stay compiled. The memory of one grows with its text."""
_LONGEST_REASON = 200
_PROBE = "graft_probe"
_CALL = re.compile(
    r'(?P<before>.*?)\{\s*"name":\s*"' + _PROBE + r'",\s*"(?P<key>\w+)":\s*\{\s*\}\s*\}(?P<after>.*)',
    re.DOTALL,
)


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class CallForm(NamedTuple):
    """How the base's template writes one call: the text around its JSON, and the key of the arguments."""

    before: str
    key: str
    after: str


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be called from several threads."""

    def __init__(self, template: "ChatTemplate", *, layout: Mapping[str, Any] = FREE_LAYOUT) -> None:
        self._template = template
        self._options = {"x-guidance": dict(layout)}
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile_schema(self, schema: dict[str, Any]) -> "GrammarConstraint":
        """Raises ApiError if the schema cannot be enforced."""
        _require_library("response_format")
        return self._open(f"start: %json {self._dump(schema)}\n", param="response_format")

    def compile_tools(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        choice: str,
        parallel: bool,
        schema: dict[str, Any] | None = None,
    ) -> "GrammarConstraint":
        """`choice` is `required`, `=name`, or `auto`: calls that follow their schemas, or else text.

        With `schema` the text must be JSON that follows it.
        """
        _require_library("tool_choice" if choice != "auto" else "tools")
        form, functions = require_call_form(self._template), choose_functions(tools, choice)
        parts = {"body": self._dump(write_call_schema(functions, form.key))}
        if choice == "auto" and schema is not None:
            parts["answer"] = self._dump(schema)
        grammar = _write_tool_grammar(form, parts, choice=choice, parallel=parallel)
        return self._open(grammar, param="tools")

    async def compile_for(self, request: "GenerateRequest") -> "GrammarConstraint | None":
        """What the answer must follow. Compiling runs in a thread, so that other streams continue."""
        schema, choice = request.json_schema, request.tool_choice
        if request.tools and (
            choice != "auto" or schema is not None or (request.strict_tools and is_installed())
        ):
            return await asyncio.to_thread(
                self.compile_tools,
                request.tools,
                choice=choice,
                parallel=request.parallel_tool_calls,
                schema=schema,
            )
        return None if schema is None else await asyncio.to_thread(self.compile_schema, schema)

    def _dump(self, schema: dict[str, Any]) -> str:
        return json.dumps({**schema, **self._options})

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        from llguidance import LLTokenizer

        return LLTokenizer(self._template.tokenizer_json, eos_token=self._template.eos)

    def _open(self, grammar: str, *, param: str) -> "GrammarConstraint":
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar, param)
            self._compiled[grammar] = matcher
            while len(self._compiled) > 1 and sum(map(len, self._compiled)) > _KEPT_CHARACTERS:
                self._compiled.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy(), grammar, self._tokenizer)

    def _compile(self, grammar: str, param: str) -> "llguidance.LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=500_000,
            step_lexer_fuel=100_000,
            step_max_items=20_000,
            max_lexer_states=20_000,
            max_grammar_size=50_000,
        )
        compiled = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()  # some faults show at the first token
        if probe.is_error():
            reason = " ".join(probe.get_error().partition("<state>")[0].split())[:_LONGEST_REASON]
            raise ApiError(
                400, f"{param} cannot be enforced: {reason}", param=param, code="unsupported_schema"
            )
        return matcher


class GrammarConstraint:
    """A TokenConstraint over one answer. A grammar that fails during generation ends the answer; see
    `error`."""

    def __init__(
        self, matcher: "llguidance.LLMatcher", grammar: str, tokenizer: "llguidance.LLTokenizer"
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._eos = tokenizer.eos_token
        self.grammar = grammar
        """The grammar in llguidance's own syntax."""
        self.error = ""

    def accepts(self, text: str) -> bool:
        """Whether a whole answer follows the grammar."""
        matcher = self._matcher.deep_copy()
        tokens = self._tokenizer.tokenize_str(text)
        return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())

    def allowed(self, vocabulary: int) -> "Tensor":
        import numpy as np
        import torch

        allowed = np.zeros(vocabulary, dtype=bool)
        if not self._matcher.is_error():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            most = min(vocabulary, len(bits))
            allowed[:most] = bits[:most]
        if self._matcher.is_error():
            self.error = self._matcher.stop_reason()
        if self.error or not allowed.any():
            allowed[:] = False
            allowed[self._eos] = True
        return torch.from_numpy(allowed)

    def advance(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def choose_functions(tools: Sequence[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
    """The functions that `tool_choice` leaves."""
    functions = [tool["function"] for tool in tools]
    return [function for function in functions if choice in ("auto", "required", f"={function['name']}")]


def require_call_form(template: "ChatTemplate") -> CallForm:
    body = template.write_call(_PROBE, {})
    match = None if body is None else _CALL.fullmatch(body)
    form = None if match is None else CallForm(match["before"], match["key"], match["after"])
    if form is None:
        message = "tool_choice cannot force a call: the base's template has no form for one that we can write"
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    return form


def _require_library(param: str) -> None:
    if not is_installed():
        install = "pip install 'graftwork[constrained]'"
        message = f"{param} needs constrained decoding, which is not installed: {install}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _write_tool_grammar(form: CallForm, parts: dict[str, str], *, choice: str, parallel: bool) -> str:
    """`parts` are JSON Schemas: `body` of a call, `answer` of what may come instead of calls."""
    before, after = form.before, form.after
    calls = "call" if not parallel or choice.startswith("=") else 'call ("\\n" call)*'
    lines = [f"start: {calls}"]
    if "answer" in parts:
        lines = [f"start: answer | {calls}"]
    elif choice == "auto":
        unmatched = re.escape(before.strip() or "{").replace("/", r"\/")
        lines = [f"start: TEXT | {calls}", f"TEXT: /(?s:.*)/ & ~/(?s:.*){unmatched}(?s:.*)/"]
    around = [*([json.dumps(before)] if before else []), "body", *([json.dumps(after)] if after else [])]
    lines += [f"call: {' '.join(around)}"]
    lines += [f"{name}: %json {schema}" for name, schema in parts.items()]
    return "\n".join(lines) + "\n"


def write_call_schema(functions: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """The JSON Schema of a call of one of the functions. `key` is that of the arguments."""
    alone = len(functions) == 1
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                key: _move_references(
                    function["parameters"], f"{'' if alone else f'/anyOf/{index}'}/properties/{key}"
                ),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    return schemas[0] if alone else {"anyOf": schemas}


def _move_references(schema: Any, to: str) -> Any:
    """Make a schema part of another one at the JSON pointer `to`: its references are updated."""
    if isinstance(schema, list):
        return [_move_references(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = f"#{to}{value[1:]}"
        else:
            moved[name] = value if name in _VALUES else _move_references(value, to)
    return moved
