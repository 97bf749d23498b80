"""Which package may import which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "graftwork"
STAGES = {
    "data", "plan", "train", "evaluate", "registry", "serve", "fleet", "components", "cycle",
}  # fmt: skip
GROUND = {"engines", "http", "grading", "costmodel", "model", "text", "files", "process", "records"}

MAY_IMPORT: dict[str, set[str]] = {
    "records": set(),
    "files": {"text", "records"},
    "text": {"records"},
    "process": {"files", "records"},
    "model": {"files", "process", "text", "records"},
    "costmodel": {"model", "text", "files", "process", "records"},
    "http": {"text", "files", "process", "records"},
    "engines": {"http", "model", "text", "files", "process", "records"},
    "grading": {"model", "text", "files", "process", "records"},
    **{stage: set(GROUND) for stage in STAGES},
    "views": STAGES | GROUND,
    "store": STAGES | GROUND,
    "project": STAGES | GROUND,
    "pipeline": STAGES | GROUND | {"store", "project", "views"},
    "api": STAGES | GROUND | {"store", "project", "pipeline", "views"},
    "web": GROUND - {"engines", "http", "grading", "costmodel", "model"} | {"api", "views"},
    "cli": STAGES | GROUND | {"store", "project", "pipeline", "api", "views", "web"},
}

HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "sqlalchemy",
    "openai",
    "httptools",
    "uvloop",
    "jinja2",
    "starlette",
    "uvicorn",
}


def imports_of(path: Path) -> set[str]:
    """The rooms of graftwork that a file imports, wherever in the file it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [node.module or ""]
            if node.module == "graftwork":
                names = [f"graftwork.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("graftwork.")}
    return found & {room.name for room in SOURCE.iterdir() if room.is_dir()}


def rooms() -> list[str]:
    return sorted(room.name for room in SOURCE.iterdir() if room.is_dir() and room.name != "__pycache__")


def test_every_package_has_a_rule():
    assert set(rooms()) == set(MAY_IMPORT)


@pytest.mark.parametrize("room", rooms())
def test_a_package_imports_only_packages_below_it(room):
    for path in (SOURCE / room).rglob("*.py"):
        beyond = imports_of(path) - {room} - MAY_IMPORT[room]
        assert not beyond, f"{path.relative_to(SOURCE)} imports {sorted(beyond)}"


def test_only_the_store_uses_sql():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] != "store":
            assert "sqlalchemy" not in path.read_text(), path


def test_nothing_is_unpickled():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "torch.load(" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_yaml_is_read_in_one_place():
    """The one that bounds aliases and nesting."""
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() != "files/config_text.py":
            text = path.read_text()
            found = re.search(r"yaml\.(\w*load|compose|parse|scan|\w*Loader)\b", text)
            assert not found, path


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_loads_nothing_heavy():
    loaded = loaded_after(
        "from graftwork.cli.main import app\n"
        "import io, contextlib\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    app(['--help'], standalone_mode=False)\n"
    )
    assert "typer" in loaded
    assert not loaded & (HEAVY | {"pydantic"})


def test_importing_graftwork_loads_nothing_heavy():
    loaded = loaded_after("import graftwork\nassert 'open_project' in dir(graftwork)")
    assert not loaded & (HEAVY | {"pydantic", "typer", "rich"})


def test_printing_a_plan_needs_neither_stores_nor_the_settings_of_a_project():
    loaded = loaded_after("from graftwork.api.plans import plan_fit\nimport graftwork.cli.show.plan")
    assert not loaded & (HEAVY | {"sqlalchemy"})


def test_an_audit_needs_only_the_core(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a question?", "completion": "an answer."}\n')
    loaded = loaded_after(
        f"from graftwork.data.prepare import audit_files\nassert audit_files(({str(log)!r},)).rows == 1"
    )
    assert not loaded & (HEAVY - {"numpy"})


def test_the_steps_and_the_status_of_a_project_need_no_arrays():
    """Every command that opens a project imports these."""
    loaded = loaded_after("import graftwork.api.project\nimport graftwork.pipeline.status")
    assert "graftwork" in loaded
    assert not loaded & (HEAVY - {"sqlalchemy", "jinja2"} | {"pyarrow", "httpx"})


def test_every_module_says_what_it_is():
    for path in SOURCE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
