"""Trees from JSON Schema and OpenAPI: one leaf for each operation or definition.

In: a document. Out: a tree whose leaves have inputs and outputs; examples of a schema are requirements that
can be run. Where a file is neither, it is read as a specification.
"""

import json
import re
from pathlib import Path
from typing import Any

from graftwork.components.spec.read import is_schema, parse_spec
from graftwork.components.spec.tree import SpecNode, SpecTree, snake_case
from graftwork.files.config_text import parse_yaml, read_config_text
from graftwork.records.errors import UserMistake

_METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
_SCHEMA = re.compile(r"""(?:^|[{,])\s*["']?(?:openapi|swagger|\$schema|\$defs)["']?\s*:""", re.M)


def read_any(path: Path) -> SpecTree:
    """A specification, or the tree of an OpenAPI document or a JSON Schema."""
    text = read_config_text(path)
    return parse_any(text, where=str(path))


def parse_any(text: str, *, where: str) -> SpecTree:
    if not _SCHEMA.search(text):
        return parse_spec(text, where=where)
    content = parse_yaml(text, where=where).content
    if not is_schema(content):
        return parse_spec(text, where=where)
    return from_openapi(content) if "paths" in content else from_json_schema(content, where=where)


def from_openapi(document: dict[str, Any]) -> SpecTree:
    """Operations grouped by the first part of their path."""
    info = document.get("info") if isinstance(document.get("info"), dict) else {}
    groups: dict[str, list[SpecNode]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items() if isinstance(item, dict) else ():
            if method in _METHODS and isinstance(operation, dict):
                group = str(path).strip("/").partition("/")[0] or "root"
                groups.setdefault(group, []).append(_operation(document, str(path), method, operation))
    children = []
    for number, (group, leaves) in enumerate(groups.items(), 1):
        named = [leaf.model_copy(update={"id": f"{number}.{n}"}) for n, leaf in enumerate(leaves, 1)]
        children.append(SpecNode(id=str(number), name=group, children=tuple(named)))
    root = SpecNode(
        id="0",
        name=str((info or {}).get("title") or "Api"),
        fields={"version": str((info or {}).get("version") or "")},
        children=tuple(children),
    )
    return SpecTree(dialect="yaml", root=root)


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> SpecNode:
    inputs: dict[str, str] = {}
    for each in operation.get("parameters") or ():
        parameter = _resolve(document, each)
        inputs[snake_case(str(parameter.get("name", "")))] = _type(
            document, parameter.get("schema") or parameter
        )
    body = _schema_of(_resolve(document, operation.get("requestBody") or {}))
    if body is not None:
        inputs["body"] = _type(document, body)
    answers = operation.get("responses") if isinstance(operation.get("responses"), dict) else {}
    good: Any = next((value for code, value in (answers or {}).items() if str(code).startswith("2")), {})
    result = _schema_of(_resolve(document, good))
    name = str(operation.get("operationId") or f"{method} {path}")
    return SpecNode(
        id="",
        name=name,
        fields={
            "metadata": {
                "description": str(operation.get("summary") or operation.get("description") or name),
                "inputs": inputs,
                "outputs": {"result": _type(document, result) if result is not None else "none"},
            },
            "operation": f"{method.upper()} {path}",
        },
    )


def from_json_schema(document: dict[str, Any], *, where: str) -> SpecTree:
    """One leaf for each definition: a function that checks or builds such a value."""
    defined = document.get("$defs") or document.get("definitions") or {}
    if not isinstance(defined, dict):
        raise UserMistake("the definitions of this schema are no mapping", fix="check $defs", where=where)
    title = str(document.get("title") or "Schema")
    schemas = {**({title: document} if "properties" in document else {}), **defined}
    leaves = [
        SpecNode(
            id=f"1.{number}",
            name=f"validate {name}",
            fields={
                "metadata": {
                    "description": str(schema.get("description") or f"Whether a value is a valid {name}"),
                    "inputs": {"value": _type(document, schema)},
                    "outputs": {"valid": "bool"},
                },
                "schema": _plain(schema),
                **_examples(name, schema),
            },
        )
        for number, (name, schema) in enumerate(schemas.items(), 1)
        if isinstance(schema, dict)
    ]
    group = SpecNode(id="1", name="Validation", children=tuple(leaves))
    return SpecTree(dialect="yaml", root=SpecNode(id="0", name=title, children=(group,)))


def _examples(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Examples are valid by definition: each is a requirement that states a call."""
    listed = schema.get("examples")
    given = [
        *(listed if isinstance(listed, list) else []),
        *([schema["example"]] if "example" in schema else []),
    ]
    function = snake_case(f"validate {name}")
    calls = [f"{function}({json.dumps(_plain(value))}) == true" for value in given]
    return {"requirements": calls} if calls else {}


def _plain(value: Any) -> Any:
    """Plain data; what YAML reads as dates becomes text."""
    return json.loads(json.dumps(value, default=str))


def _resolve(document: dict[str, Any], value: Any) -> dict[str, Any]:
    """Follow references within the document, a few steps at most."""
    for _ in range(8):
        reference = value.get("$ref") if isinstance(value, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = document
        for part in reference[2:].split("/"):
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, dict) else {}
            )
        value = found
    return value if isinstance(value, dict) else {}


def _schema_of(holder: dict[str, Any]) -> dict[str, Any] | None:
    content = holder.get("content")
    if isinstance(content, dict):
        chosen: Any = content.get("application/json") or next(iter(content.values()), {})
        return (
            chosen.get("schema")
            if isinstance(chosen, dict) and isinstance(chosen.get("schema"), dict)
            else None
        )
    return holder.get("schema") if isinstance(holder.get("schema"), dict) else None


def _type(document: dict[str, Any], schema: Any, depth: int = 0) -> str:
    """The type in the words that specifications use."""
    found = _resolve(document, schema)
    if depth > 4 or not found:
        return "any"
    if isinstance(found.get("enum"), list):
        return " | ".join(repr(value) if isinstance(value, str) else str(value) for value in found["enum"])
    kind = found.get("type")
    if isinstance(kind, list):
        return " | ".join(str(each) for each in kind)
    if kind == "array":
        return f"list({_type(document, found.get('items') or {}, depth + 1)})"
    if kind == "object" or "properties" in found:
        return "map"
    return str(kind) if kind else "any"
