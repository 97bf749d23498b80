"""Constrained decoding: a JSON Schema, or the tools that must be called, to the tokens that may come next.

Grammars are compiled by llguidance with limits on their size and on the work of each step, so that neither a
schema nor its regular expressions can stop the engine. What llguidance cannot enforce is refused by name.
"""

import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.serve.http_messages import ApiError

if TYPE_CHECKING:
    import llguidance
    from torch import Tensor

    from graftwork.model.chat.template import ChatTemplate

_WHITESPACE = r"(\n[ \t]{0,24}| )?"
"""Compact or indented JSON; a small model that may write any white space can go on with it for ever."""
_KEPT = 64
_LONGEST_REASON = 200
_PROBE = "graft_probe"
_CALL = re.compile(
    r'(?P<before>.*?)\{\s*"name":\s*"' + _PROBE + r'",\s*"(?P<key>\w+)":\s*\{\s*\}\s*\}(?P<behind>.*)',
    re.DOTALL,
)


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class CallForm(NamedTuple):
    """How the base's template writes one call: the text around its JSON, and the key of the arguments."""

    before: str
    key: str
    behind: str


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be called from several threads."""

    def __init__(self, template: "ChatTemplate") -> None:
        self._template = template
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile_schema(self, schema: dict[str, Any]) -> "GrammarConstraint":
        """Raises ApiError if the schema cannot be enforced."""
        _require_library("response_format")
        from llguidance import LLMatcher

        overrides: Any = {"whitespace_pattern": _WHITESPACE}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
        return self._open(grammar, param="response_format")

    def compile_tools(
        self, tools: Sequence[dict[str, Any]], *, choice: str, parallel: bool
    ) -> "GrammarConstraint":
        """`choice` is `required`, `=name`, or `auto`: text or calls that follow their schemas."""
        _require_library("tool_choice" if choice != "auto" else "tools")
        from llguidance import LLMatcher

        form = self.call_form
        if form is None:
            message = (
                "tool_choice cannot force a call: the base's template has no form for one that we can write"
            )
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        functions = [
            tool["function"]
            for tool in tools
            if choice in ("auto", "required", f"={tool['function']['name']}")
        ]
        grammar = LLMatcher.grammar_from_lark(_write_tool_grammar(form, functions, choice, parallel))
        return self._open(grammar, param="tools")

    @cached_property
    def call_form(self) -> CallForm | None:
        body = self._template.write_call(_PROBE, {})
        found = None if body is None else _CALL.fullmatch(body)
        return None if found is None else CallForm(found["before"], found["key"], found["behind"])

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        from llguidance import LLTokenizer

        return LLTokenizer(self._template.tokenizer_json, eos_token=self._template.eos)

    def _open(self, grammar: str, *, param: str) -> "GrammarConstraint":
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar, param)
            self._compiled[grammar] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy(), eos=self._template.eos)

    def _compile(self, grammar: str, param: str) -> "llguidance.LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=500_000,
            step_lexer_fuel=100_000,
            step_max_items=20_000,
            max_lexer_states=20_000,
            max_grammar_size=50_000,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
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
    """A TokenConstraint over one answer. A grammar that fails on the way ends the answer; see `error`."""

    def __init__(self, matcher: "llguidance.LLMatcher", *, eos: int) -> None:
        self._matcher = matcher
        self._eos = eos
        self.error = ""

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


def _require_library(param: str) -> None:
    if not is_installed():
        install = "pip install 'graftwork[constrained]'"
        message = f"{param} needs constrained decoding, which is not installed: {install}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _write_tool_grammar(form: CallForm, functions: list[dict[str, Any]], choice: str, parallel: bool) -> str:
    before, behind = form.before, form.behind
    calls = "call" if not parallel or choice.startswith("=") else 'call ("\\n" call)*'
    lines = [f"start: {calls}"]
    if choice == "auto":
        opening = before.strip() or "{"
        lines = [f"start: TEXT | {calls}", f"TEXT: /(?s:.*)/ & ~/(?s:.*){_escape(opening)}(?s:.*)/"]
    schemas = [_call_schema(function, form.key) for function in functions]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    parts = (
        [_quote(text) for text in (before,) if text] + ["body"] + [_quote(text) for text in (behind,) if text]
    )
    lines += [f"call: {' '.join(parts)}", f"body: %json {json.dumps({**options, **schema})}"]
    return "\n".join(lines) + "\n"


def _call_schema(function: dict[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: function["parameters"]},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _quote(text: str) -> str:
    return json.dumps(text)


def _escape(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
