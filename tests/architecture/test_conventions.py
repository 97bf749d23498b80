"""Conventions of the package: no import cycles, unique class names, bounded files and signatures."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "graftwork"
MOST_PARAMETERS = 7

SAME_CLASS_NAME = {
    # One adapter per tracking library, never imported together.
    "_Run",
}
"""Class names that may occur more than once, each with its reason."""

RETIRED_WORDS = (
    r"narrat(?:or|e)",
    r"\bvigil\b",
    r"\b[Vv]ault\b",
    r"\b[Cc]rews?\b",
    r"\b[Aa]ttendants?\b",
    r"\b[Tt]old\b",
    r"\b[Tt]ell(?:s|ing)?\b",
    r"\b[Bb]eside\b",
    r"\b[Ww]hoever\b",
    r"\b[Rr]eckon\w*",
    r"\b[Aa]new\b",
    r"\b[Dd]ealt\b",
    r"\b[Ff]urnish(?:es|ed)?\b",
    r"\bfor one in\b",
    r"[Ww]orkplace",
    r"write_whole",
    r"folder_made_whole",
)
"""Regular expressions. Words of the old vocabulary that are gone from src, tests and docs."""
STILL_ALLOWED = {
    # Columns, keys and fields that are stored.
    r"""\bdealt\b(?=:|=|\)|,|"|`| TEXT| is not| ==| an exchange)|[.]dealt\b""",
    r"""\bcrew(?=:|=|")|[.]crew\b""",
    r'"attendants?"|"beside"',
    # The method of files; a prompt; a product's name.
    r"[.]tell\(\)|tell nobody|Tell me\b|\bvault login\b|\"vault\"",
    # Azure's Key Vault.
    r"Key Vault|VaultClient|VAULT|vault[.]azure|[._/]vault\b",
    r"\bvault(?=:|\(|/|`| if the run| with soft| of the wor)",
}
"""Regular expressions. Uses of retired words that stay, each with its reason."""
TEXT = {".py", ".md", ".yaml", ".toml", ".jinja", ".js", ".css"}


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_between(known: dict[str, Path]) -> dict[str, set[str]]:
    """What each module imports of the package, deferred and type-only imports included."""
    graph = {}
    for module, path in known.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in known else node.module for name in names}
        graph[module] = {name for name in found if name in known and name != module}
    return graph


def find_cycles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    # Modules that nobody imports, or that import nothing, are in no cycle.
    left = dict(graph)
    while True:
        used = set().union(*left.values()) if left else set()
        kept = {name: found & left.keys() for name, found in left.items() if name in used}
        kept = {name: found & kept.keys() for name, found in kept.items()}
        kept = {name: found for name, found in kept.items() if found}
        if kept.keys() == left.keys():
            break
        left = kept
    graph = {name: found & left.keys() for name, found in left.items()}
    reached = {name: reach(name) for name in graph}
    return {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }


def test_modules_import_each_other_in_one_direction():
    assert not find_cycles(imports_between(modules()))


def test_find_cycles_finds_the_groups_and_nothing_else():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}}
    assert find_cycles(graph) == {("a", "b", "c")}


def test_no_class_name_occurs_twice():
    found = defaultdict(set)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(module)
    twice = {name for name, where in found.items() if len(where) > 1} - SAME_CLASS_NAME
    assert not {name: sorted(found[name]) for name in twice}


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton kernels take pointers and sizes, no objects."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_take_an_object_instead_of_eight_parameters():
    wide = [
        f"{module}.{node.name}: {parameters_of(node)}"
        for module, path in modules().items()
        # The options of a command are its parameters.
        if not module.startswith("graftwork.cli.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters_of(node) > MOST_PARAMETERS
        and not is_compiled(node)
    ]
    assert not wide


def test_retired_words_do_not_come_back():
    pattern, allowed = re.compile("|".join(RETIRED_WORDS)), re.compile("|".join(STILL_ALLOWED))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for folder in ("src", "tests", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in TEXT and path.name != Path(__file__).name and path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(allowed.sub("", line))
    ]
    assert not found, "\n".join(found)
