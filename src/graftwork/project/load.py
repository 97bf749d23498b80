"""Read graft.yaml strictly: every mistake is reported with its line, its rule and a fix.

Input: a path. Output: ProjectSettings. Unknown keys are refused with the nearest known one suggested;
duplicate keys are refused, since YAML would silently keep the last.
"""

import difflib
import logging
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from graftwork.files.config_text import parse_yaml, read_config_text
from graftwork.project.other_tools import find_ours
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import marks_of
from graftwork.records.errors import UserError
from graftwork.text.redact import publish_text
from graftwork.text.wording import explain_error, truncate


def list_single_texts(content: dict[Any, Any], owner: type[BaseModel]) -> dict[Any, Any]:
    return {
        key: _wrap_single_texts(value, owner.model_fields[key].annotation)
        if key in owner.model_fields
        else value
        for key, value in content.items()
    }


def _wrap_single_texts(value: Any, annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list_single_texts(value, annotation) if isinstance(value, dict) else value
    inner = get_args(annotation)
    if get_origin(annotation) is tuple and inner == (str, ...):
        return [value] if isinstance(value, str) else value
    if get_origin(annotation) is tuple and isinstance(value, list):
        return (
            [_wrap_single_texts(item, inner[0]) for item in value]
            if len(inner) == 2 and inner[1] is ...
            else value
        )
    if get_origin(annotation) is dict and isinstance(value, dict):
        return {key: _wrap_single_texts(entry, inner[1]) for key, entry in value.items()}
    # One of several kinds, most often an optional value: the first that fixes it.
    return next(
        (wrapped for kind in inner if (wrapped := _wrap_single_texts(value, kind)) is not value), value
    )


PROJECT_FILE = "graft.yaml"


def load_settings(path: Path) -> ProjectSettings:
    if not path.exists():
        raise UserError(
            f"there is no {path.name} here",
            why="a project is a folder with this file",
            fix="`graft init YOUR_LOG.jsonl` writes one; -C FOLDER names a project elsewhere",
            where=str(path.parent.resolve()),
        )
    content, root = parse_yaml(read_config_text(path), where=str(path))
    lines = _lines_of(root, path) if root is not None else {}
    if not isinstance(content, dict):
        raise UserError(
            f"{path.name} is empty or not a mapping of keys",
            fix="`graft init` writes one to start from",
            where=str(path),
        )
    try:
        return ProjectSettings.model_validate(list_single_texts(content, ProjectSettings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = tuple(str(part) for part in first["loc"])
        name = ".".join(key)
        why = _list_other_errors(error, lines)
        # A rule about several keys is reported at the first of them that is set.
        concerned = _concerned(key, first["msg"]) if first["type"] == "value_error" else []
        reported_at = next((key for key in concerned if key in lines), key)
        line = next(
            (lines[reported_at[:n]] for n in range(len(reported_at), 0, -1) if reported_at[:n] in lines), 1
        )
        where = f"{path}:{line}"
        if concerned:
            message = f"{name}: {explain_error(first)}" if name else explain_error(first)
            verb = "change" if any(key in lines for key in concerned) else "give"
            fix = f"{verb} {' or '.join('.'.join(key) for key in concerned)}"
        elif first["type"] == "extra_forbidden":
            message, fix = f"unknown key {name!r}", _nearest(key)
        elif first["type"] == "missing":
            message, fix = f"the key {name!r} is missing", f"add {name!r} to {path.name}"
        elif first["type"] == "value_error" and isinstance(first["input"], dict):
            message, fix = f"{name}: {explain_error(first)}", f"change the value of {name}"
        else:
            message = f"{name}: {explain_error(first)}, found {_name_value(key, first['input'])}"
            owner = _owner(key)
            field = owner.model_fields.get(key[-1]) if owner else None
            described = field.description if field else None
            fix = described or "`graft schema` lists what each key takes"
        raise UserError(message, why=why, fix=fix, where=where) from error


_MOST_OTHERS = 8


def _list_other_errors(error: ValidationError, lines: dict[tuple[str, ...], int]) -> str:
    """List the other mistakes, each with its line, so that all can be fixed at once."""
    mistakes = []
    for mistake in error.errors(include_url=False, include_input=False)[1:]:
        key = tuple(str(part) for part in mistake["loc"])
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        line_note = f" (line {line})" if line is not None else ""
        mistakes.append(f"{'.'.join(key)}{line_note}: {explain_error(mistake)}")
    surplus = len(mistakes) - _MOST_OTHERS
    ending = [f"and {surplus} more"] if surplus > 0 else []
    return f"also wrong: {'; '.join([*mistakes[:_MOST_OTHERS], *ending])}" if mistakes else ""


def _lines_of(node: yaml.Node, path: Path, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Return the line of every key, and refuse duplicate ones."""
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*prefix, str(key.value))
            if here in lines:
                raise UserError(
                    f"the key {'.'.join(here)!r} occurs twice",
                    why=f"first in line {lines[here]}; YAML would silently keep the last",
                    fix="remove one of them",
                    where=f"{path}:{key.start_mark.line + 1}",
                )
            lines[here] = key.start_mark.line + 1
            lines.update(_lines_of(value, path, here))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*prefix, str(index))] = value.start_mark.line + 1
            lines.update(_lines_of(value, path, (*prefix, str(index))))
    return lines


def _owner(key: tuple[str, ...]) -> type[BaseModel] | None:
    """The settings class that the last part of `key` should belong to."""
    owner: Any = ProjectSettings
    names_follow = False
    for part in key[:-1]:
        if part.isdigit() or names_follow:
            # A place in a list, or a name that the user chose: no key of ours.
            names_follow = False
            continue
        field = owner.model_fields.get(part)
        owner = _model_in(field.annotation) if field is not None else None
        if field is None or owner is None:
            return None
        names_follow = get_origin(field.annotation) is dict
    model_type: type[BaseModel] = owner
    return model_type


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        model_name = _model_in(inner)
        if model_name is not None:
            return model_name
    return None


def _nearest(key: tuple[str, ...]) -> str:
    owner = _owner(key)
    if ours := find_ours(key[-1]):
        return f"`{key[-1]}` is {' or '.join(f'`{path}`' for path in ours)} here"
    keys = list(owner.model_fields) if owner else []
    close = difflib.get_close_matches(key[-1], keys, n=1, cutoff=0.5)
    if close:
        return f"did you mean {'.'.join((*key[:-1], close[0]))!r}?"
    return f"known here: {', '.join(keys)}" if keys else "`graft schema` lists all keys"


def _concerned(key: tuple[str, ...], message: str) -> list[tuple[str, ...]]:
    """The keys of `key` that a rule about several keys names, in order."""
    owner = _owner((*key, ""))
    if owner is None:
        return []
    names = re.findall(r"\w+", message)
    return [(*key, word) for word in dict.fromkeys(names) if word in owner.model_fields]


def _name_value(key: tuple[str, ...], value: object) -> str:
    """Name the value; a whole section would hide the message, and a secret is not shown."""
    owner = _owner(key)
    # Marked either way: users may have written the key itself in place of a variable name.
    if owner is not None and key[-1] in marks_of(owner):
        return "a value that is not shown"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, list | tuple):
        return "a list"
    return truncate(publish_text(repr(value)), 60)


log = logging.getLogger(__name__)
