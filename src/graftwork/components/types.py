"""Types of parameters as specifications write them: `list(string)`, `String.t()`, `int | None`.

Input: text, in words of several languages. Output: a `Shape`, the words that are not Python, whether a value
fits.
"""

import re
from typing import Any, Literal, NamedTuple

Kind = Literal["str", "int", "float", "bool", "bytes", "list", "dict", "none", "any", "union", "literal"]
PYTHON_WORDS: dict[str, Kind] = {
    "str": "str", "int": "int", "float": "float", "bool": "bool", "bytes": "bytes", "list": "list",
    "dict": "dict", "tuple": "list", "None": "none", "any": "any", "Any": "any",
}  # fmt: skip
_OTHER_WORDS: dict[Kind, tuple[str, ...]] = {
    "str": (
        "string", "text", "String.t()", "string.t()", "char", "charlist", "binary", "bitstring", "path",
        "datetime", "date", "uuid", "url", "atom", "symbol",
    ),
    "int": ("integer", "non_neg_integer", "pos_integer", "neg_integer"),
    "float": ("number", "double", "decimal"),
    "bool": ("boolean",),
    "dict": ("map", "object", "struct", "hash", "keyword", "keyword_list"),
    "list": ("array",),
    "none": ("nil", "null", "void"),
    "any": ("json", "term", "unknown"),
}  # fmt: skip
OTHER_WORDS: dict[str, Kind] = {word: kind for kind, words in _OTHER_WORDS.items() for word in words}
"""Type names of Elixir, JSON Schema and others. `binary` is text here: cases are JSON, which has no bytes."""
_OPTIONAL = re.compile(r"^optional[(\[](.*)[)\]]$", re.I)
_OF = re.compile(r"^(?P<outer>list|array|tuple|List|Array|\w+)[(\[<](?P<inner>.*)[)\]>]$")
_ATOM = re.compile(r"^:\w+[?!]?$")
_QUOTED = re.compile(r"""^(["'])(.*)\1$""")
_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?$")


class Shape(NamedTuple):
    """A type. `of` are the parts of a union or the item of a list; `values` those of a literal."""

    kind: Kind
    of: tuple["Shape", ...] = ()
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "union":
            return " | ".join(map(str, self.of))
        if self.kind == "literal":
            return f"Literal[{', '.join(map(repr, self.values))}]"
        if self.kind == "list" and self.of:
            return f"list[{self.of[0]}]"
        return {"none": "None", "any": "object"}.get(self.kind, self.kind)


def read_type(text: str) -> tuple[Shape | None, tuple[str, ...]]:
    """Return the type, None if it maps to no Python type, and the words of other languages in it."""
    foreign: list[str] = []
    return _read(text.strip(), foreign), tuple(dict.fromkeys(foreign))


def _read(text: str, foreign: list[str]) -> Shape | None:
    parts = _split(text, "|")
    if len(parts) > 1:
        shapes = [_read(part, foreign) for part in parts]
        return _union([shape for shape in shapes if shape is not None]) if all(shapes) else None
    if text.endswith("?") and len(text) > 1:
        foreign.append(text)
        return _or_none(_read(text[:-1].strip(), foreign))
    return _read_word(text, foreign) or _read_outer(text, foreign)


def _read_word(text: str, foreign: list[str]) -> Shape | None:
    if _ATOM.match(text):
        foreign.append(text)
        return Shape("literal", values=(text[1:],))
    if quoted := _QUOTED.match(text):
        return Shape("literal", values=(quoted[2],))
    if _NUMBER.match(text):
        return Shape("literal", values=(float(text) if "." in text else int(text),))
    if text in PYTHON_WORDS:
        return Shape(PYTHON_WORDS[text])
    if word := OTHER_WORDS.get(text) or OTHER_WORDS.get(text.lower()):
        foreign.append(text)
        return Shape(word)
    return None


def _read_outer(text: str, foreign: list[str]) -> Shape | None:
    """Read a type that contains others: list(string), [string], Optional[int], {:ok, term}."""
    if optional := _OPTIONAL.match(text):
        return _or_none(_read(optional[1].strip(), foreign))
    if text.startswith(("{", "[")) and text.endswith(("}", "]")):
        foreign.append(text)
        item = _read(text[1:-1].strip(), foreign) if text.startswith("[") and len(text) > 2 else None
        return Shape("list", (item,) if item is not None else ())
    match = _OF.match(text)
    if match is None:
        return None
    outer, inner = match["outer"], _split(match["inner"], ",")
    if "[" not in text or not text.startswith(("list", "dict", "tuple")):
        foreign.append(outer)
    kind = PYTHON_WORDS.get(outer) or OTHER_WORDS.get(outer.lower())
    if kind == "list":
        item = _read(inner[0], foreign) if inner[0] else None
        return Shape("list", (item,) if item is not None and len(inner) == 1 else ())
    return Shape(kind) if kind is not None else None


def _or_none(shape: Shape | None) -> Shape | None:
    return _union([shape, Shape("none")]) if shape is not None else None


def _split(text: str, mark: str) -> list[str]:
    """Split at this separator outside of brackets and quotes."""
    depth, quote, parts, current = 0, "", [], ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{<") - (letter in ")]}>")
        if letter == mark and depth <= 0 and not quote:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()]


def _union(shapes: list[Shape]) -> Shape:
    literals = [shape for shape in shapes if shape.kind == "literal"]
    remaining = [shape for shape in shapes if shape.kind != "literal"]
    if literals:
        remaining.insert(0, Shape("literal", values=tuple(v for shape in literals for v in shape.values)))
    unique = list(dict.fromkeys(remaining))
    return unique[0] if len(unique) == 1 else Shape("union", tuple(unique))


def fits(value: Any, shape: Shape) -> bool:
    """Whether a plain value has this shape."""
    if shape.kind == "union":
        return any(fits(value, part) for part in shape.of)
    if shape.kind == "literal":
        return any(type(value) is type(literal) and value == literal for literal in shape.values)
    if shape.kind == "list":
        return isinstance(value, list) and (not shape.of or all(fits(item, shape.of[0]) for item in value))
    if isinstance(value, bool):
        return shape.kind in ("bool", "any")
    return isinstance(value, _PLAIN_TYPES[shape.kind])


_PLAIN_TYPES: dict[str, Any] = {
    "any": object, "none": type(None), "float": (int, float), "int": int, "str": str, "bytes": str,
    "bool": bool, "dict": dict,
}  # fmt: skip


def python_type(text: str) -> str:
    """The type in Python syntax; empty if unknown."""
    shape, _ = read_type(text)
    return str(shape) if shape is not None and shape.kind != "any" else ""
