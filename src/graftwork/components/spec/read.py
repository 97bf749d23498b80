"""Files of specifications: recognized by their content, read into a tree, written in either dialect.

In: paths. Out: trees, or UserMistake with the reason and the line. Free text is refused, never guessed at.
"""

import re
from pathlib import Path
from typing import Any

from graftwork.components.spec.outline import is_outline, read_outline, write_outline
from graftwork.components.spec.tree import Dialect, SpecTree
from graftwork.components.spec.yaml_tree import read_yaml_tree, write_yaml_tree
from graftwork.files.config_text import parse_yaml, read_config_text
from graftwork.records.errors import UserMistake

ENDINGS = (".tiki", ".yaml", ".yml", ".outline")
_MEANT_AS_YAML = re.compile(r"^(?:id|name|children|metadata)[ \t]*:", re.M)
_MARKDOWN = re.compile(r"^#{1,6}[ \t]+\S", re.M)
_TREE_KEYS = frozenset({"id", "name", "children", "metadata", "stages"})


def read_spec(path: Path) -> SpecTree:
    """The tree of a file."""
    return parse_spec(read_config_text(path), where=str(path))


def parse_spec(text: str, *, where: str) -> SpecTree:
    if is_outline(text):
        return read_outline(text, where=where)
    try:
        content = parse_yaml(text, where=where).content
    except UserMistake as error:
        if len(_MEANT_AS_YAML.findall(text)) > 1:
            raise
        raise _free_text(text, where=where, why=f"it is no YAML ({error.what})") from error
    if is_schema(content):
        raise UserMistake(
            "this is an OpenAPI document or a JSON Schema",
            why="its leaves need ids that cases can name",
            fix="write a specification from it: `graft spec convert FILE --to yaml --out NAME.tiki`",
            where=where,
        )
    if not isinstance(content, dict):
        raise _free_text(text, where=where, why=f"its YAML is {_kind_of(content)}, not a mapping")
    if not _TREE_KEYS & content.keys():
        keys = ", ".join(str(key) for key in list(content)[:6])
        raise _free_text(text, where=where, why=f"its keys ({keys}) are none of id, name, children, metadata")
    return read_yaml_tree(text, where=where)


def is_schema(content: Any) -> bool:
    """Whether a document is an OpenAPI document or a JSON Schema: `convert` makes a tree of it."""
    if not isinstance(content, dict) or "children" in content:
        return False
    if {"openapi", "swagger"} & content.keys() and isinstance(content.get("paths"), dict):
        return True
    defines = {"properties", "$defs", "definitions"} & content.keys()
    return bool({"$schema", "$defs"} & content.keys() and defines)


def _kind_of(content: Any) -> str:
    if isinstance(content, list):
        return "a list"
    return "empty" if content is None else "plain text"


def write_spec(tree: SpecTree, dialect: Dialect) -> str:
    return write_outline(tree) if dialect == "outline" else write_yaml_tree(tree)


def _free_text(text: str, *, where: str, why: str) -> UserMistake:
    if not text.strip():
        found = "the file is empty"
    else:
        headings = len(_MARKDOWN.findall(text))
        found = "YAML without a tree" if why.startswith("its keys") or "a list" in why else "free text"
        if headings and found == "free text":
            found += f" with {headings} Markdown heading{'s' if headings > 1 else ''}"
    return UserMistake(
        f"this is no specification: {found}",
        why=f"it has no numbered headings (*1, *1**1), and {why}",
        fix="write a YAML tree with id, name and children, or an outline of numbered headings",
        where=where,
    )
