"""A configuration file as keys with their lines: YAML and JSON alike.

In: text. Out: each value by its path, with the line of its key. Does not know what the keys mean.
"""

import re
from typing import Any, NamedTuple

import yaml

from graftwork.files.config_text import parse_json, parse_yaml
from graftwork.records.errors import UserMistake

Path_ = tuple[str, ...]
NUMBER_AS_TEXT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
PLACEHOLDER = re.compile(r"YOUR[_ -]|^<[^>]+>$|CHANGE[_ -]?ME|^TODO\b|^\.\.\.$", re.IGNORECASE)


class Value(NamedTuple):
    value: Any
    line: int | None


class WrittenConfig(NamedTuple):
    """All leaves of a file by their path, lists whole."""

    file: str
    leaves: dict[Path_, Value]

    def named(self, name: str) -> tuple[str, Value] | None:
        """The leaf whose path ends so: `save_steps`, or `lora.r` where the last part alone is too short."""
        parts = tuple(name.split("."))
        found = [(path, leaf) for path, leaf in self.leaves.items() if path[-len(parts) :] == parts]
        if not found:
            return None
        path, leaf = min(found, key=lambda one: len(one[0]))
        return ".".join(path), leaf

    def has(self, *names: str) -> bool:
        return any(self.named(name) is not None for name in names)


def read_written(text: str, *, file: str) -> WrittenConfig:
    is_json = file.endswith(".json") or text.lstrip().startswith("{")
    if is_json:
        content: Any = parse_json(text, where=file)
        node = _compose_json(text)
    else:
        content, node = parse_yaml(text, where=file)
    if not isinstance(content, dict):
        raise UserMistake(
            "this is not a mapping of keys", fix="name a configuration in YAML or JSON", where=file
        )
    return WrittenConfig(file, _leaves(content, _lines(node)))


def texts_for_numbers(written: WrittenConfig) -> dict[str, str]:
    return {
        ".".join(path): leaf.value
        for path, leaf in written.leaves.items()
        if isinstance(leaf.value, str) and NUMBER_AS_TEXT.match(leaf.value)
    }


def placeholders(written: WrittenConfig) -> dict[str, str]:
    return {
        ".".join(path): leaf.value
        for path, leaf in written.leaves.items()
        if isinstance(leaf.value, str) and PLACEHOLDER.search(leaf.value)
    }


def _compose_json(text: str) -> yaml.Node | None:
    """JSON is nearly YAML; where it is not (tabs), lines are not known, which spoils nothing else."""
    try:
        return parse_yaml(text, where="").root
    except UserMistake:
        return None


def _lines(node: yaml.Node | None, prefix: Path_ = ()) -> dict[Path_, int]:
    found: dict[Path_, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*prefix, str(key.value))
            found[here] = key.start_mark.line + 1
            found.update(_lines(value, here))
    return found


def _leaves(content: dict[Any, Any], lines: dict[Path_, int], prefix: Path_ = ()) -> dict[Path_, Value]:
    found: dict[Path_, Value] = {}
    for key, value in content.items():
        here = (*prefix, str(key))
        if isinstance(value, dict):
            found.update(_leaves(value, lines, here))
        else:
            found[here] = Value(value, lines.get(here))
    return found
