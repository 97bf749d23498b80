"""docs/settings.md from the settings themselves: `python tools/settings_page.py` writes it anew."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftwork.project.other_tools import OTHER_NAMES
from graftwork.project.settings import ProjectSettings

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Every key of `graft.yaml`, with its default. `graft init LOG` writes the keys that most projects need; `graft
schema` prints the JSON Schema that editors complete and check with. A mistake is reported with its line and a
fix. Keys of transformers, TRL, Axolotl and LLaMA-Factory are recognized, and the error names the key to use
here.

This page is generated: `python tools/settings_page.py`.
"""
OTHERS = """
## Names in other tools

| here | transformers, PEFT, TRL | Axolotl | LLaMA-Factory |
|---|---|---|---|
"""


def list_leaves(
    schema: dict[str, Any], defs: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting by its path: `[]` is an item of a list, `NAME` a name that the user chooses."""
    for key, field in schema.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        section, suffix = find_section(field, defs)
        if section is not None and here.count(".") < 6 and not is_repeated(here):
            yield from list_leaves(section, defs, here + suffix)
        else:
            yield here, field


def is_repeated(path: str) -> bool:
    """Whether a section has the keys of another that the page shows."""
    return path.startswith("models.NAME.")


def find_section(field: dict[str, Any], defs: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            section = defs[option["$ref"].rpartition("/")[2]]
            return (section, "") if "properties" in section else (None, "")
        for inner, suffix in ((option.get("items"), "[]"), (option.get("additionalProperties"), ".NAME")):
            if isinstance(inner, dict) and "$ref" in inner:
                section = defs[inner["$ref"].rpartition("/")[2]]
                return (section, suffix) if "properties" in section else (None, "")
    return None, ""


def describe(field: dict[str, Any]) -> str:
    options = [value for part in (field, *field.get("anyOf", ())) for value in part.get("enum", ())]
    said = str(field.get("description", "")).replace("|", "\\|").replace("\n", " ")
    listed = ", ".join(f"`{value}`" for value in options)
    return f"{said} {'One of ' + listed + '.' if listed else ''}".strip()


def default_of(field: dict[str, Any]) -> str:
    if "default" not in field:
        return ""
    shown = json.dumps(field["default"], ensure_ascii=False)
    return f"`{shown}`" if len(shown) <= 60 else "…"


def render() -> str:
    schema = ProjectSettings.model_json_schema()
    leaves = list(list_leaves(schema, schema["$defs"]))
    parts = [HEAD]
    sections = dict.fromkeys(
        path.partition(".")[0].partition("[")[0] if "." in path else "" for path, _ in leaves
    )
    for section in sections:
        rows = [
            (path, field)
            for path, field in leaves
            if (path.partition(".")[0].partition("[")[0] if "." in path else "") == section
        ]
        title = f"`{section}`" if section else "The project"
        said = schema["properties"][section].get("description", "") if section else ""
        parts.append(
            f"\n## {title}\n\n{said + chr(10) * 2 if said else ''}| key | default | |\n|---|---|---|\n"
        )
        parts += [f"| `{path}` | {default_of(field)} | {describe(field)} |\n" for path, field in rows]
    parts.append(OTHERS)
    for ours, names in OTHER_NAMES.items():
        cells = (" × ".join(f"`{name}`" for name in part.split()) for part in names)
        parts.append(f"| `{ours}` | {' | '.join(cells)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
