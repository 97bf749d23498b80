"""Sub-packages import only those below them, and modules form no import cycles, deferred imports included."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "graftwork"

# One line per package: its modules and sub-packages from the lowest level to the highest. Members of one
# level, separated by a comma, do not import each other.
ORDER = {
    "components": "settings, spec < verify < generate",
    "costmodel": "allocator, which_step < stream, card_tensors, packing, processor, rates "
    "< card_step, rollouts, run_time, plain_time, trace < answers, "
    "plain_decoder < card_memory < card_time < card_tuning, distributed, probed_rates "
    "< plain_memory < streamed",
    "data": "condition < settings < ingest < audit < dedup < corpus < split < render "
    "< prepare, export, inspect, repair, drift",
    "grading": "line_process, matching, score_audit, taskset_worker < answers, taskset "
    "< interface < code, tool_calls < call_environment < custom < calls, hacks, metrics < rules < checks "
    "< grade, prefix < rewards < reward_runner, reward_worker",
    "http": "messages < server < client",
    "engines": "settings, interface < protocol, embedded, endpoint, llamacpp < selection, constrained, "
    "upstream_server, process < child, replies, upstream_dialects < upstream_replies, embedded_process, "
    "llamacpp_process < upstream",
    "evaluate": "statistics, cases < subjects < settings, comparison < power, costs, "
    "prompts, family < escalation, score < report < judge < gate < ask, ab, preflight, "
    "exchange",
    "model": "hub, nf4_kernel < adapter_shape, base, families, headers, nf4, probe, threads "
    "< blocks, parts, shape < chat, probe_rates < load < adapters < generate, gguf",
    "views": "templates, svg < escalation, plots, notebook, junit < training < audit_page, evaluation_page, "
    "page, week_page",
    "train": "objective_settings, sweep < run_folder, settings < checkpoints, distributed, objectives, "
    "trackers < loss, pinned_memory < cpu, engine, side_by_side < callbacks, gpu, streamed < engine_choice, "
    "loop, rollouts, unused_settings < run_setup, run_source < worker < multi_run",
    "api": "audits, components, models, plans < project < captures, cycle, datasets, endpoint, "
    "evaluations, fleet, generations, reviews, runs < overview, releases",
    "web": "static, templates, connections, options, security, warm_up < rendering < live, actions < views "
    "< app < serve",
    "fleet": "place < settings, far_side, far_start, "
    "bootstrap, results, simulated_hosts < bundle, ledger < runner, control, image < places",
    "cycle": "cron < settings < state < decide",
    "cli": "output < show < progress < command, fleet_hosts < fleet < data, evaluate, "
    "generate, model, project, reward, run, spec, train, ui, up, worker < serve < gate, plan, release < main",
    "plan": "settings, residuals, catalog, week < fit, stages, estimate, serving < micro_batches, cost, lint "
    "< purchase",
}
SUBPACKAGES: dict[str, list[list[str]]] = {
    package: [level.split(", ") for level in order.split(" < ")] for package, order in ORDER.items()
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Every module of graftwork that a file imports, wherever in the file and for whatever purpose."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            children = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= children or ({node.module} & known)
    return found


def import_graph(package: str) -> dict[str, set[str]]:
    paths = {module_name(path): path for path in (SOURCE / package).rglob("*.py")}
    return {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}


def member_of(module: str) -> str:
    """The first part below the package: `split` of `graftwork.data.split.groups`."""
    return module.split(".")[2]


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_every_member_of_a_package_has_a_level(package):
    found = [path for path in (SOURCE / package).iterdir() if path.is_dir() or path.suffix == ".py"]
    members = {path.stem if path.is_file() else path.name for path in found}
    listed = [name for level in SUBPACKAGES[package] for name in level]
    assert sorted(listed) == sorted(members - {"__init__", "__pycache__"})


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_only_lower_levels(package):
    level = {name: number for number, names in enumerate(SUBPACKAGES[package]) for name in names}
    for module, imported in import_graph(package).items():
        if module.count(".") < 2:
            continue
        own = member_of(module)
        for other in {member_of(name) for name in imported if name.count(".") >= 2} - {own}:
            assert level[other] < level[own], f"{module} imports {other}, which is not below {own}"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_modules_form_no_import_cycle(package):
    graph = import_graph(package)
    users = defaultdict(set)
    for module, imported in graph.items():
        for name in imported:
            users[name].add(module)
    waiting = {module: len(imported) for module, imported in graph.items()}
    ready = [module for module, count in waiting.items() if not count]
    while ready:
        for user in users[ready.pop()]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    assert not (cycle := sorted(module for module, count in waiting.items() if count)), cycle
