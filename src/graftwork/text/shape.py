"""Detect by form: placeholders, cut-off or failed replies, script, damaged characters, control tokens.

Input: a text. Output: the reason it is recognized by, or None. Does not know the question; when in doubt,
reports nothing.
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import orjson

# The first character of each range, in order; the rest is "other".
_RANGES: tuple[tuple[int, str], ...] = (
    *((0x0000, "latin"), (0x0250, "other"), (0x0370, "greek"), (0x0400, "cyrillic"), (0x0530, "other")),
    *((0x0590, "hebrew"), (0x0600, "arabic"), (0x0700, "other"), (0x0750, "arabic"), (0x0780, "other")),
    *((0x0870, "arabic"), (0x0900, "devanagari"), (0x0980, "other"), (0x0E00, "thai"), (0x0E80, "other")),
    *((0x1100, "hangul"), (0x1200, "other"), (0x1C80, "cyrillic"), (0x1C90, "other")),
    *((0x1E00, "latin"), (0x1F00, "greek"), (0x2000, "other"), (0x2C60, "latin"), (0x2C80, "other")),
    *((0x2DE0, "cyrillic"), (0x2E00, "other"), (0x2E80, "han"), (0x2FE0, "other"), (0x3005, "han")),
    *((0x3008, "other"), (0x3040, "kana"), (0x3100, "other"), (0x3130, "hangul"), (0x3190, "other")),
    *((0x31F0, "kana"), (0x3200, "other"), (0x3400, "han"), (0x4DC0, "other"), (0x4E00, "han")),
    *((0xA000, "other"), (0xA640, "cyrillic"), (0xA6A0, "other"), (0xA720, "latin"), (0xA800, "other")),
    *((0xA8E0, "devanagari"), (0xA900, "other"), (0xA960, "hangul"), (0xA980, "other")),
    *((0xAB30, "latin"), (0xAB70, "other"), (0xAC00, "hangul"), (0xD800, "other"), (0xF900, "han")),
    *((0xFB00, "latin"), (0xFB13, "other"), (0xFB1D, "hebrew"), (0xFB50, "arabic"), (0xFE00, "other")),
    *((0xFE70, "arabic"), (0xFF00, "other"), (0xFF21, "latin"), (0xFF5B, "other"), (0xFF66, "kana")),
    *((0xFFA0, "hangul"), (0xFFE0, "other"), (0x1B000, "kana"), (0x1B170, "other"), (0x20000, "han")),
    (0x32000, "other"),
)
_STARTS = [start for start, _ in _RANGES]
_LETTER = re.compile(r"[A-Za-z]")
SAMPLE = 400

# UTF-8 that was read as Latin-1 or CP1252: the first byte of a sequence, then what the others became. Some
# became punctuation that may follow a letter in valid text (`MAÇÃ…`, `café…»`), so a capital before it, or a
# single sequence, is not proof.
_SIGNS = "\u0080-\u00bf€‚ƒ„†‡ˆ‰Š‹ŒŽ‘•˜™š›œžŸ"
_CONTINUED = _SIGNS + "…’“”–—"
_MOJIBAKE = re.compile(
    rf"[\u00c2-\u00f0](?:(?<=[ÂÃ])[{_SIGNS}]|(?<=(?<![A-ZÀ-Þ])Ã)[…’“”–—]"
    rf"|(?<=[\u00c4-\u00df])[{_CONTINUED}][\u00c4-\u00df][{_CONTINUED}]"
    rf"|(?<=â)[{_SIGNS}”–][{_CONTINUED}]"
    rf"|(?<=[à-ï])[{_CONTINUED}]{{2}}[à-ï][{_CONTINUED}]{{2}}"
    rf"|(?<=ð)[{_SIGNS}][{_CONTINUED}]{{2}})"
)
# Tabs, line ends, form feeds and terminal escapes are valid.
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\x0c\x1b"))
MANY_CONTROLS = 4


def main_script(text: str) -> str:
    """Return the script of most letters in a sample; `none` without letters.

    Japanese mixes kana and ideographs: more than a fifth of kana decides.
    """
    if text.isascii():
        return "latin" if _LETTER.search(text) else "none"
    sample = text if len(text) <= SAMPLE else text[:: -(-len(text) // SAMPLE)]
    counts = Counter(_name_script(letter) for letter in sample if letter.isalpha())
    if not counts:
        # The sample may have skipped the few letters.
        letter = next((sign for sign in text if sign.isalpha()), None)
        return "none" if letter is None else _name_script(letter)
    eastern = counts["kana"] + counts["han"]
    if 0 < eastern <= counts["kana"] * 5 and 2 * eastern >= counts.total():
        return "kana"
    return counts.most_common(1)[0][0]


def find_garble(text: str) -> str | None:
    """Return the first sign that characters were lost or misread; None if there is none."""
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) - len(raw.translate(None, _CONTROLS)) >= MANY_CONTROLS:
        return "many control characters"
    if text.isascii():
        return None
    if "\ufffd" in text:
        return "characters that could not be decoded (U+FFFD)"
    if "ï»¿" in text:
        return "a byte-order mark read as letters"
    if _MOJIBAKE.search(text):
        return "UTF-8 that was read as Latin-1"
    return None


def _name_script(letter: str) -> str:
    return _RANGES[bisect_right(_STARTS, ord(letter)) - 1][1]


KNOWN_CONTROL_TOKENS: tuple[str, ...] = (
    # ChatML: Qwen, SmolLM, Yi and many fine-tunes
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>"),
    # Llama 2, Mistral
    *("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    # Llama 3 and 4
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    # Gemma
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    # Phi, Zephyr, Granite, Falcon
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start_of_role|>", "<|end_of_role|>"),
    # gpt-oss (harmony)
    *(
        "<|start|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|constrain|>",
        "<|startoftext|>",
    ),
    *("<|endofprompt|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    # DeepSeek
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    # Command R
    *("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)


def find_control_tokens(text: str, tokens: Sequence[str] = KNOWN_CONTROL_TOKENS) -> list[str]:
    """Return the tokens that occur in `text`, each once, in order."""
    finder = _make_finder(tuple(tokens))
    if finder is None:
        return []
    openings, regex = finder
    for opening in openings:
        if opening in text:
            return list(dict.fromkeys(regex.findall(text)))
    return []


@lru_cache(maxsize=64)
def _make_finder(tokens: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]] | None:
    """Return the first characters of the tokens, and one expression for all, longest first."""
    ordered = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    if not ordered:
        return None
    openings = tuple(sorted({token[0] for token in ordered}))
    by_opening = "|".join(
        re.escape(opening)
        + "(?:"
        + "|".join(re.escape(token[1:]) for token in ordered if token[0] == opening)
        + ")"
        for opening in openings
    )
    return openings, re.compile(by_opening)


MOST_VALUES = 1 << 20
"""The most values of one row, or of JSON written as text in one. Long conversations have thousands."""

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
_STRING_OR_MARK = re.compile(rf"{_STRING}|([,\[{{])", re.DOTALL)
_STRING_OR_MARK_BYTES = re.compile(_STRING_OR_MARK.pattern.encode(), re.DOTALL)


def has_too_many_values(text: str | bytes, *, most: int = MOST_VALUES) -> bool:
    """Count the starts of values, ignoring commas and brackets in strings.

    Parsed values take up to a hundred times their bytes: 30 MB of `{},{},{}` become a gigabyte.
    """
    if len(text) < most:
        return False
    if isinstance(text, str):
        if text.count(",") + text.count("[") + text.count("{") < most:
            return False
        marks = (match.lastindex for match in _STRING_OR_MARK.finditer(text))
    else:
        if text.count(b",") + text.count(b"[") + text.count(b"{") < most:
            return False
        marks = (match.lastindex for match in _STRING_OR_MARK_BYTES.finditer(text))
    count = 0
    for mark in marks:
        if mark:
            count += 1
            if count >= most:
                return True
    return False


# What follows a frame begins with a letter, so that the frame never backtracks.
_FRAME_BEFORE = r"""[\s"'`<\[({*_.-]*+"""
_FRAME_AFTER = r"""[\s"'`>\])}*_.!…-]*$"""
_STAND_INS = re.compile(
    _FRAME_BEFORE
    + r"""(?:
        (?:this\ is\ (?:a|an|the|only\ a|just\ a)\ )?
            (?:mock|dummy|sample|stub|fake|test|canned|default)(?:ed)?[\s_-]
            (?:response|reply|answer|output|text|completion|message)
            (?:[\s_-]\#?\d+|[\s_-](?:here|text|for\ (?:unit\ )?test(?:s|ing)?))?
      | (?:todo|tbd|fixme|xxx+|placeholder|asdf+|lorem\ ipsum)
      | (?:test[\s,]+)+test
      | (?:placeholder|todo|tbd|fixme)\s{0,3}[:(-].{0,80}
      | (?:placeholder|todo|tbd|fixme)\s
            (?:add|answer|fill|fix|implement|later|reply|response|text|write)\b.{0,60}
      | (?:insert|enter|your|put|add|some)\ [\w\ -]{0,30}?(?:answer|response|reply|text|output)(?:\ here)?
      | (?:answer|response|reply|text|output)\ (?:goes\ )?here
      | to\ be\ (?:done|determined|filled(?:\ in)?|written|completed)
      | not\ (?:yet\ )?implemented(?:\ yet)?
    )"""
    + _FRAME_AFTER,
    re.IGNORECASE | re.VERBOSE,
)
# As a whole reply these say nothing; as one value in JSON they may be the answer.
_NOTHING_SAID = re.compile(
    _FRAME_BEFORE + r"(?:[Nn]/?[Aa]|null|None|undefined|NaN|foo|foobar|no (?:output|response))" + _FRAME_AFTER
)
_LOREM = re.compile(r"\blorem ipsum dolor\b", re.IGNORECASE)
_LOREM_BYTES = b"ipsum dolor"
_BLANK = re.compile(r"[\[<{](?:insert|your|enter|add|placeholder)\b[^\]>}\n]{0,60}[\]>}]", re.IGNORECASE)
_MADE_UP = re.compile(r"\[(?:generated|simulated|placeholder) (?:content|text)\b", re.IGNORECASE)
# A variable of a template: `Dear {{name}}`, and none of code such as `${{ matrix.os }}` or `{{ a.b | e }}`.
_VARIABLE = re.compile(r"(?<![$`\w\"'=>{\\])\{\{ ?[^\W\d](?:[\w -]{0,38}\w)? ?\}\}(?![`\w\"'<}])")
_CODE_MARKS = ("```", "{%", "</", "{{#", "{{/")
# A bracket that says what an answer would contain, where the answer should be.
_DESCRIBED = re.compile(
    r"""\s*+[\[<](?:
        (?:this|the)\ (?:answer|response|reply)\ (?:would|should|will|demonstrates|illustrates)\b
      | (?:generated|simulated|mock|sample|placeholder)\ (?:answer|response|reply)\ ?(?:for\b|to\b|:)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
# A blank in a short reply is the reply; in a long one it may be a form that was asked for.
SHORT_REPLY = 300
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")

_TRACEBACK = re.compile(
    r"[`\s]*+(?:Traceback \(most recent call last\):"
    r"|(?:Uncaught )?[A-Za-z_.]{0,80}(?:Error|Exception): [^\n]{0,500}\n[ \t]+at "
    r"|panicked at |thread '[^'\n]{1,80}' panicked)"
)
_FAILURE = re.compile(
    r"""[\s"'`*\[({]*+(?:
        (?:fatal\ |internal\ |server\ |api\ |unexpected\ |http\ )*(?:error|exception)\b\s*[:\-\d(\]]
      | (?:[a-z_.]*(?:error|exception)):\ \S
      | (?:http\ )?(?:4\d\d|5\d\d)\ (?:bad|unauthori[sz]ed|forbidden|not\ found|too\ many|internal
            |service|gateway)
      | <html>.{0,200}?\b(?:4\d\d|5\d\d)\b
      | (?:the\ )?(?:request|operation|connection|call|model|server|upstream|tool|agent)\ (?:has\ )?
            (?:failed|timed\ out|was\ (?:aborted|rejected|refused|reset))
      | request\ time-?out | rate\ limit\ (?:exceeded|reached)
      | internal\ server\ error | service\ unavailable | bad\ gateway
      | (?:oops|whoops)?[,!.\s]*something\ went\ wrong
      | an\ (?:unexpected\ |internal\ )?error\ (?:has\ )?occurred
      | (?:sorry|apologies|i\ (?:am|'m)\ sorry|i'm\ sorry|i\ apologi[sz]e|we\ are\ sorry|we're\ sorry
            |unfortunately|oops|whoops)\b
            .{0,80}?(?:an\ (?:unexpected\ |internal\ )?error|went\ wrong|error\ occurred|timed\ out
            |try\ again\ later|technical\ (?:difficult|problem|issue)|rate\ limit
            |temporarily\ unavailable
            |(?:could\ not|couldn't|unable\ to|cannot|can't)\ (?:process|complete)\ (?:your|the|this)\ request
            |(?:could\ not|couldn't|unable\ to|cannot|can't)\ reach\ the)
    )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_BEGINS_AS_JSON = re.compile(r'(?:\{\s*(?:"|$)|\[\s*(?:["{\[\d-]|$))')
_JSON_MARK = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?P<closing>"?)|[{}\[\]]', re.DOTALL)
_ERROR_KEYS = frozenset({"error", "errors", "exception", "traceback"})

_THINK = re.compile(r"<(/?)(think|thinking|reasoning|scratchpad)>", re.IGNORECASE)
# Searching for the literal line end first is several times faster.
_FENCE = re.compile(r"\n[ \t]{0,3}(?:```|~~~)")
_ENDS = frozenset(""".!?…。！？)]}>"'”’»`*_|~""")
_SIGN_AT_END = re.compile(r"[\U0001F000-\U0001FAFF☀-➿]")
_HANGING = re.compile(
    r"(?:,|\b(?:a|an|the|and|or|but|of|to|in|on|at|for|with|from|by|that|which|is|are|was|were|as|if"
    r"|because|when|this|these|its|their|our|your|we|can|will|should|must|not))\Z",
    re.IGNORECASE,
)
_LONGEST_HANGING = len("because")
LONG_ENOUGH_TO_HANG = 120
# A token of prose has about four characters; code and JSON go down to two and a half.
CHARACTERS_PER_TOKEN = 2.5


def find_placeholder(reply: str) -> str | None:
    """Recognize a placeholder in place of an answer."""
    text = reply.strip()
    if not text:
        return None
    if not _LETTER_OR_DIGIT.search(text) and text not in ("{}", "[]"):
        return "only punctuation"
    # Lowercase bytes are searched in a tenth of the time of the expression.
    may_hold_lorem = _LOREM_BYTES in text.encode("utf-8", "surrogatepass").lower()
    if _is_stand_in(text) or _NOTHING_SAID.match(text) or (may_hold_lorem and _LOREM.search(text)):
        return "a stand-in text"
    leaves = ((leaf, leaf.strip()) for leaf in _texts_in_json(text))
    if any(_is_stand_in(leaf) or _BLANK.fullmatch(bare) or bare in ("...", "…") for leaf, bare in leaves):
        return "a stand-in text inside the JSON"
    if _MADE_UP.search(text) or (len(text) <= SHORT_REPLY and _BLANK.search(text)):
        return "a blank that was never filled in"
    return "a variable of a template that was never filled in" if _has_variable(text) else None


def _has_variable(text: str) -> bool:
    return "{{" in text and not any(mark in text for mark in _CODE_MARKS) and bool(_VARIABLE.search(text))


def has_placeholder(prompt: str) -> bool:
    """Whether a prompt contains `[Simulated content from ...]` and similar, or variables of a template."""
    return _MADE_UP.search(prompt) is not None or _has_variable(prompt)


def find_cut(reply: str, *, finish_reason: str | None = None, max_tokens: int | None = None) -> str | None:
    """Recognize a reply that stops before its end."""
    if finish_reason in ("length", "max_tokens", "MAX_TOKENS"):
        return "the log says that the token limit ended it"
    if finish_reason == "incomplete":
        return "the log says that the stream broke off"
    text = reply.strip()
    if not text:
        return None
    open_part = _find_open_part(text)
    # A model that reports a regular stop did not stop in a sentence, but may leave JSON open.
    if open_part or finish_reason or text[-1] in _ENDS or _SIGN_AT_END.match(text[-1]):
        return open_part
    if max_tokens is not None and len(text) >= max_tokens * CHARACTERS_PER_TOKEN:
        return f"it stops in a sentence near the limit of {max_tokens} tokens"
    # One character more than the longest word, for the space before it.
    hangs = len(text) >= LONG_ENOUGH_TO_HANG and _HANGING.search(text[-_LONGEST_HANGING - 1 :])
    return "it stops in the middle of a sentence" if hangs else None


def find_failure(reply: str) -> str | None:
    """Recognize a reply that reports a technical failure instead of answering."""
    text = reply.strip()
    if _TRACEBACK.match(text):
        return "a traceback"
    # A long reply that begins with an error's name more likely explains it.
    if len(text) <= SHORT_REPLY and _FAILURE.match(text):
        return "an error message"
    if text.startswith("{"):
        value = _load_json(text)
        if isinstance(value, dict) and len(value) <= 3 and any(value.get(key) for key in _ERROR_KEYS):
            return "an error object"
    return None


def _find_open_part(text: str) -> str | None:
    is_json = text[0] in "{["
    if is_json and _load_json(text) is not None:
        return None  # whole, whatever is inside its strings
    depth = 0
    for match in _THINK.finditer(text):
        depth += -1 if match.group(1) else 1
    if depth > 0:
        return "a thinking part that is never closed"
    if ("```" in text or "~~~" in text) and len(_FENCE.findall("\n" + text)) % 2:
        return "a code block that is never closed"
    if is_json and _json_is_cut(text):
        return "JSON that is never closed"
    return None


def _json_is_cut(text: str) -> bool:
    """Whether text that begins as JSON ends inside a string or with open brackets."""
    if not _BEGINS_AS_JSON.match(text):
        return False
    depth = 0
    for match in _JSON_MARK.finditer(text):
        mark = match.group()
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth == 0:
                # The value was complete; what follows is not a cut.
                return False
        elif not match.group("closing"):
            return True
    return depth > 0


def _is_stand_in(text: str) -> bool:
    return bool(_STAND_INS.match(text) or _DESCRIBED.match(text))


@lru_cache(maxsize=1)
def _load_json(text: str) -> Any:
    """Parse JSON; None if it is none. Cached: one reply is parsed several times in a row."""
    if has_too_many_values(text):
        return None
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    try:
        # It also accepts NaN, which is not a fault of a reply.
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _texts_in_json(text: str) -> Iterator[str]:
    """Yield the strings that are values in a JSON reply."""
    if text[0] not in "{[":
        return
    waiting = [_load_json(text)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
