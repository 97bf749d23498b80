"""Which package may import which."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "graftwork"
# What a package may import, from the lowest to the highest.
FOUNDATION = {
    "records": "",
    "text": "records",
    "files": "text records",
    "process": "files records",
    "model": "files process text records",
    "costmodel": "model text files process records",
    "http": "text files process records",
    "engines": "http model text files process records",
    "grading": "model text files process records",
}
# The features, each with those whose modules its own may use where they work on an open project.
# All else in a feature is pure: it imports the foundation and its own package.
FEATURES = {
    "data": "evaluate plan",
    "plan": "train",
    "week": "cycle data fleet plan train views",
    "train": "data evaluate fleet plan registry views",
    "evaluate": "data fleet plan registry serve train views",
    "registry": "data evaluate serve",
    "serve": "data evaluate registry",
    "fleet": "data evaluate plan train",
    "components": "evaluate",
    "cycle": "data evaluate fleet registry serve",
}
AROUND = {
    "views": {*FEATURES, *FOUNDATION, "pipeline"},
    "store": {*FEATURES, *FOUNDATION},
    "project": {*FEATURES, *FOUNDATION, "store", "pipeline"},
    "pipeline": {*FEATURES, *FOUNDATION, "store", "project", "views"},
    "api": {*FEATURES, *FOUNDATION, "store", "project", "pipeline", "views"},
    "web": {"text", "files", "process", "records", "api", "views"},
    "cli": {*FEATURES, *FOUNDATION, "store", "project", "pipeline", "api", "views", "web"},
}
OPEN_PROJECT = {"project", "store", "pipeline"}
"""A module that imports one of these works on an open project."""
# Those of each feature; a module that is not listed stays pure.
ON_A_PROJECT = {
    "data": "captures project repair.project review",
    "plan": "fit.project lint.project probe project",
    "week": "follow project",
    "train": "distributed.multi_node all_models federated sweep rollouts.project router runs "
    "taskset_export worker_process",
    "evaluate": "commands gate.family gate.project live.answer_checks live.canary live.comparison live.drift "
    "live.shadow live.traffic measure_escalation project project_subjects",
    "registry": "deploy export project prompt_release",
    "serve": "project",
    "fleet": "jobs plans project",
    "components": "project",
    "cycle": "coordinator runner session",
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


Graph = dict[str, set[str]]


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: Collection[str]) -> set[str]:
    """Every module of graftwork that a file imports, wherever in the file and for whatever purpose."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            children = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
            imported |= children or ({node.module} & set(modules))
    return imported - {name_of(path), "graftwork", "graftwork.version"}


@pytest.fixture(scope="module")
def graph() -> Graph:
    paths = {name_of(path): path for path in SOURCE.rglob("*.py")}
    return {name: imported_modules(path, paths.keys()) for name, path in paths.items()}


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def on_a_project(graph: Graph) -> set[str]:
    """The modules of features that work on an open project, directly or through another."""
    working = {module for module, imported in graph.items() if OPEN_PROJECT & {*map(package_of, imported)}}
    while more := {module for module, imported in graph.items() if imported & working} - working:
        working |= more
    return {module for module in working if package_of(module) in FEATURES}


def find_cycle(graph: Graph) -> list[str]:
    """What remains when whatever imports nothing of the rest is taken away again and again."""
    rest = dict(graph)
    while ready := {name for name, imported in rest.items() if not imported & rest.keys()}:
        rest = {name: imported for name, imported in rest.items() if name not in ready}
    return sorted(rest)


def test_every_package_has_a_rule():
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == {*FOUNDATION, *FEATURES, *AROUND}


@pytest.mark.parametrize("package", [*FOUNDATION, *FEATURES, *AROUND])
def test_a_package_imports_only_what_its_rule_names(package, graph):
    working = on_a_project(graph)
    for module in (name for name in graph if package_of(name) == package):
        if package in FOUNDATION:
            allowed = set(FOUNDATION[package].split())
        elif package in AROUND:
            allowed = AROUND[package]
        elif module in working:
            allowed = {*FOUNDATION, *FEATURES[package].split(), *OPEN_PROJECT}
        else:
            allowed = set(FOUNDATION)
        beyond = {*map(package_of, graph[module])} - allowed - {package}
        assert not beyond, f"{module} imports {sorted(beyond)}"


def test_views_name_what_works_on_a_project_only_in_annotations():
    for path in (SOURCE / "views").glob("*.py"):
        tree = ast.parse(path.read_text())
        used = [
            node.module
            for part in tree.body
            if not ast.unparse(part).startswith("if TYPE_CHECKING:")
            for node in ast.walk(part)
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        assert not {name for name in used if package_of(name) in OPEN_PROJECT}, path


@pytest.mark.parametrize("package", FEATURES)
def test_the_modules_that_work_on_a_project_are_listed(package, graph):
    """The command that plans, trains or grades without a project imports only the others."""
    modules = {f"graftwork.{package}.{name}" for name in ON_A_PROJECT[package].split()}
    assert {name for name in on_a_project(graph) if package_of(name) == package} == modules


def test_modules_form_no_import_cycle(graph):
    """Deferred imports included."""
    assert not find_cycle(graph)


@pytest.mark.parametrize("package", [*FOUNDATION, *FEATURES, "store", "project", "web"])
def test_pure_members_of_a_package_form_no_import_cycle(package, graph):
    """A member is a module or sub-package of the package: `data.split` of `graftwork.data.split.leakage`."""
    working = on_a_project(graph)
    members: Graph = defaultdict(set)
    for module, imported in graph.items():
        if package_of(module) == package and module.count(".") > 1 and module not in working:
            member = module.split(".")[2]
            same = {name for name in imported if package_of(name) == package and name.count(".") > 1}
            members[member] |= {name.split(".")[2] for name in same - working} - {member}
    assert not find_cycle(members)


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
    loaded = loaded_after("from graftwork.api.plans import plan_fit\nimport graftwork.views.plan")
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
