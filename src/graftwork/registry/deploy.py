"""Moves releases, and puts them into service: verify, move the alias, wait for the endpoint, ask it.

Releases go between this project and archives, PEFT folders, a store at a URL, the Hub, machines and MLflow.
Everything is verified before it leaves and after it has arrived. A release is in the index only when its
files are in the store, and garbage collection cannot run in between. An endpoint loads a release before
requests go to it, and answers that are under way end on the old one. If one of the first requests fails, the
alias points at the old release again.
"""

import json
import math
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.evaluate.gate.project import find_verdict
from graftwork.model.base import copy_base, loadable_name
from graftwork.process.http_client import NoAnswer
from graftwork.process.ssh import UNREACHED, ssh_command
from graftwork.process.worker import lock_holder
from graftwork.project.open_project import OpenProject, load_template, timestamp
from graftwork.project.reporter import Reporter
from graftwork.records.base import MIB, Record
from graftwork.records.errors import (
    EXIT_DONE,
    EXIT_NEGATIVE_RESULT,
    EnvironmentFailure,
    GraftError,
    NegativeResult,
    UserError,
)
from graftwork.records.interaction import TRY_OUT_SESSION
from graftwork.records.release import Release, ReleaseFile
from graftwork.registry.archive import read_archive, write_archive
from graftwork.registry.hub import Hub
from graftwork.registry.index import find_release, wrong_project_error
from graftwork.registry.manifest import ReleaseContext
from graftwork.registry.mlflow import push_to_mlflow
from graftwork.registry.peft import import_peft_folder
from graftwork.registry.project import full_alias, open_store, promote_release, roll_back_release
from graftwork.registry.publish import find_licence
from graftwork.registry.remote_store import RemoteStore, pull_release, push_release
from graftwork.registry.ssh import SshDelivery, SshTarget, parse_target, push_over_ssh
from graftwork.serve.own_endpoint import OwnEndpoint, gateway_folder

ENOUGH_SECONDS = 1.0
"""Before that the rate is chance."""
BETWEEN_SECONDS = 0.1
"""Between two reports of the same phase: a fast disk has a thousand chunks per second."""


def report_bytes(
    reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A progress callback with rate and remaining time. A phase starts over when fewer bytes are done."""
    phase_now, began, last_report, last_done = "", 0.0, -math.inf, 0

    def report(phase: str, done: int, total: int) -> None:
        nonlocal phase_now, began, last_report, last_done
        now = clock()
        if phase != phase_now or done < last_done:
            phase_now, began, last_report = phase, now, -math.inf
        last_done = done
        if now - last_report < BETWEEN_SECONDS and done < total:
            return
        last_report = now
        seconds = now - began
        rate = done / seconds if seconds > 0 else 0.0
        is_steady = rate > 0 and seconds >= ENOUGH_SECONDS
        reporter.progress(
            phase,
            done / MIB,
            total / MIB,
            seconds_left=(total - done) / rate if is_steady else None,
            detail={"MiB/s": round(rate / MIB, 1)} if is_steady else {},
        )

    return report


class ImportedRelease(NamedTuple):
    """`remarks` are notes for the user."""

    release: Release
    version: str | None
    new: bool
    remarks: tuple[str, ...] = ()


def export_release(work: OpenProject, name: str, *, target: Path | None = None) -> tuple[Release, Path, str]:
    """Write a release as an archive, by default to the project folder. The SHA-256 of the archive is to be
    compared over another channel."""
    release = find_release(work.releases, name)
    path = target or work.project.root
    if path.is_dir():
        path /= archive_path(work, release).name
    sha256 = write_archive(open_store(work), release.id, target=path, progress=report_bytes(work.reporter))
    return release, path, sha256


def archive_path(work: OpenProject, release: Release) -> Path:
    """Where the archive of a release is written unless another place is named."""
    return work.project.root / f"{release.project}-{release.id[:12]}.tar"


def export_base(work: OpenProject, name: str, *, target: Path) -> int:
    """Write the exact base weights of a release as a folder; the number of bytes comes back."""
    release = find_release(work.releases, name)
    if release.base_fingerprint != work.base.revision:
        raise UserError(
            f"release {release.id[:12]} was trained on a different base than this project has now",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="export the base from a project, or with a --model, that has it",
            where="--base",
        )
    return copy_base(work.weights, target)


def import_release(work: OpenProject, path: Path) -> ImportedRelease:
    """Take in an archive of a release, or a PEFT folder."""
    store, progress = open_store(work), report_bytes(work.reporter)
    if not path.is_dir():
        with store.shared_lock(), read_archive(path, store=store, progress=progress) as unpacked:
            require_own_project(work, unpacked.release, where=str(path))
            arrived = unpacked.put_into(store, progress=progress)
            return add_to_index(work, arrived.release, new=arrived.new)
    base, template = work.base, load_template(work)
    release, sources, named_base, skipped = import_peft_folder(
        path,
        context=ReleaseContext(
            project=work.settings.project,
            base=base.name,
            base_fingerprint=base.revision,
            template_fingerprint=template.template_fingerprint,
            parent=None,
            created_at=timestamp(),
            settings={},
            versions={},
            licence=find_licence(Path(base.folder)),
            model=work.model,
            tokenizer_fingerprint=template.tokenizer_fingerprint,
        ),
        find_verdict=lambda weights: find_verdict(work, weights),
    )
    remarks = [
        "nothing was measured: `graft eval --subject base --subject release:ID` compares it, and "
        "`graft release promote --force --reason …` takes it as it is"
    ]
    if release.decision != "not_enough_evidence":
        remarks.insert(0, f"the same weights were judged here before: {release.decision}")
    if named_base and named_base not in (base.name, loadable_name(base.name)):
        remarks.append(f"its config names the base {named_base}; it is imported for {base.name}")
    if skipped:
        remarks.append(f"left out: {', '.join(skipped)}")
    with store.shared_lock():
        new = not store.has(release.id)
        release = store.put(release, sources=sources, progress=progress)
        return add_to_index(work, release, new=new, remarks=tuple(remarks))


def add_to_index(
    work: OpenProject, release: Release, *, new: bool, remarks: tuple[str, ...] = ()
) -> ImportedRelease:
    """Index a release of the store. Hold its `shared_lock()` around both."""
    work.releases.add(release)
    return ImportedRelease(release, work.releases.entry(release.id).version, new, remarks)


def require_own_project(work: OpenProject, release: Release, *, where: str) -> None:
    """Before anything is stored: the index takes releases of its own project only."""
    if release.project != work.settings.project:
        raise wrong_project_error(release, work.settings.project, where=where)


def push_to_url(work: OpenProject, name: str, *, url: str | None) -> tuple[Release, tuple[ReleaseFile, ...]]:
    release = find_release(work.releases, name)
    remote = RemoteStore(_address(work, url))
    return push_release(open_store(work), remote, release.id, progress=report_bytes(work.reporter))


def pull_from_url(work: OpenProject, id_or_prefix: str, *, url: str | None) -> ImportedRelease:
    """The id is looked up there: this project's index need not know it."""
    remote, store = RemoteStore(_address(work, url)), open_store(work)
    release_id = remote.find(id_or_prefix)
    require_own_project(work, remote.read(release_id), where=remote.address)
    with store.shared_lock():
        arrived = pull_release(store, remote, release_id, progress=report_bytes(work.reporter))
        return add_to_index(work, arrived.release, new=arrived.new)


def push_to_hub(work: OpenProject, name: str, *, repository: str) -> tuple[Release, str, str]:
    """The release, the immutable revision that holds it, and the tag that names it."""
    release, progress = find_release(work.releases, name), report_bytes(work.reporter)
    return release, *Hub(repository).push(open_store(work), release.id, progress=progress)


def pull_from_hub(work: OpenProject, repository: str) -> ImportedRelease:
    """`OWNER/NAME`, or `OWNER/NAME@REVISION`."""
    name, _, revision = repository.partition("@")
    store = open_store(work)
    with store.shared_lock():
        arrived = Hub(name).pull(
            store,
            revision=revision or "main",
            allow=lambda release: require_own_project(work, release, where=repository),
            progress=report_bytes(work.reporter),
        )
        return add_to_index(work, arrived.release, new=arrived.new)


def push_to_machine(work: OpenProject, name: str, *, target: str, alias: str | None) -> SshDelivery:
    """The alias moves there only to what it points at here, where the verdict was asked, and logged."""
    release = find_release(work.releases, name)
    full = full_alias(work, alias, model=release.model) if alias is not None else None
    if full is not None and work.releases.aliases().get(full) != release.id:
        raise NegativeResult(
            f"{full} does not point at release {release.id[:12]} here",
            why="an alias is moved on the serving machine only where it was moved here first, by its verdict",
            fix=f"`graft release promote {release.id[:12]} --alias {full}`, then push it",
            where="--alias",
        )
    return push_over_ssh(
        open_store(work),
        release.id,
        target=parse_target(target),
        alias=full,
        progress=report_bytes(work.reporter),
    )


def push_to_mlflow_registry(work: OpenProject, name: str, *, registered: str) -> tuple[str, bool]:
    """With the aliases that point at the release here."""
    release = find_release(work.releases, name)
    aliases = work.releases.entry(release.id).aliases
    return push_to_mlflow(open_store(work), release.id, name=registered, aliases=aliases)


def _address(work: OpenProject, url: str | None) -> str:
    address = url or getattr(work.settings.release, "store", None)
    if not address:
        raise UserError(
            "no address for the other store",
            why="neither the command nor graft.yaml names one",
            fix="give --to or --from with a URL, or set release.store: s3://bucket/folder",
            where="release.store",
        )
    return str(address)


TAKEN_OVER_SECONDS = 180.0
"""How long an endpoint may take to load a release."""
POLL_SECONDS = 0.5
ANSWER_SECONDS = 120.0
LONGEST_ANSWER = 2**20
GREETING = ({"role": "user", "content": "Say in one word that you are ready."},)
HERE = "here"

Question = Sequence[dict[str, str]]
"""The messages of one request."""


class Deployed(Record):
    """`ok` is false if the first requests failed; `why` says what."""

    release: str
    alias: str
    to: str
    previous: str | None
    ok: bool
    asked: int
    """Requests that the endpoint answered with this release."""
    why: str = ""
    taken_back: bool = False
    """The alias points at the previous release again; on a first deployment there is none."""


def deploy_here(
    work: OpenProject,
    name: str,
    *,
    alias: str | None = None,
    requests: int = 3,
    questions: Sequence[Question] = (),
    wait_seconds: float = TAKEN_OVER_SECONDS,
) -> Deployed:
    """Move the alias of this project to the release and make sure that the endpoint answers with it."""
    store = open_store(work)
    with store.shared_lock():
        if store.has(name) and name not in {entry.id for entry in work.releases.entries()}:
            # It came over SSH: the files are here, the index does not know them yet.
            arrived = store.verify(name)
            require_own_project(work, arrived, where=str(store.folder(name)))
            add_to_index(work, arrived, new=True)
    release = find_release(work.releases, name)
    full = full_alias(work, alias, model=release.model)
    _, _, move = promote_release(work, release.id, alias=alias, reason="deployed")
    previous = move.previous if move is not None else release.id
    outcome = Deployed(release=release.id, alias=full, to=HERE, previous=previous, ok=True, asked=0)
    if not requests:
        return outcome
    if (lock_holder(gateway_folder(work.project.serving)) or 0) <= 0:
        return outcome.model_copy(update={"why": "no endpoint runs here: nothing was asked"})
    prompts = [*questions, *[GREETING] * requests][:requests]
    endpoint = OwnEndpoint(work.settings.serve, root=work.project.root)
    deadline, answered, failure = time.monotonic() + wait_seconds, 0, ""
    while answered < len(prompts) and not failure:
        answered_by, failure = _ask(endpoint, full, prompts[answered])
        if failure:
            continue
        if answered_by == release.id:
            answered += 1
        elif time.monotonic() > deadline:
            failure = (
                f"after {wait_seconds:.0f} s {full} is still answered by {answered_by[:12] or 'another'}"
            )
        else:
            time.sleep(POLL_SECONDS)
    outcome = outcome.model_copy(update={"asked": answered, "why": failure})
    if not failure:
        return outcome
    reason = f"first requests failed: {failure}"
    moved = previous is not None and previous != release.id
    # A release that somebody promoted meanwhile stays.
    taken_back = moved and roll_back_release(work, release.id, alias=alias, reason=reason) is not None
    return outcome.model_copy(update={"ok": False, "taken_back": taken_back})


def _ask(endpoint: OwnEndpoint, alias: str, question: Question) -> tuple[str, str]:
    """The release that answered, or why there was no answer."""
    body = {"model": alias, "messages": list(question), "max_tokens": 32, "temperature": 0}
    headers = {"x-session-id": TRY_OUT_SESSION}
    try:
        with endpoint.send(
            "/v1/chat/completions", body, seconds=ANSWER_SECONDS, longest=LONGEST_ANSWER, headers=headers
        ) as answer:
            text = answer.read()
    except NoAnswer as error:
        return "", f"the endpoint gave no answer: {error}"
    if answer.status == 503 and b"model_not_loaded" in text:
        return "", ""
    if answer.status != 200:
        reason = text[:200].decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            reason = str(json.loads(text)["error"]["message"])[:200]
        return "", f"the endpoint answered with status {answer.status}: {reason}"
    # An answer of whatever length: how good answers are is the gate's question.
    with suppress(ValueError, KeyError, TypeError, IndexError):
        if isinstance(json.loads(text)["choices"][0]["message"], dict):
            return answer.header("x-graft-release") or "", ""
    return "", "the endpoint's answer is not a chat completion"


def deploy(
    work: OpenProject,
    name: str,
    *,
    to: str,
    alias: str | None = None,
    graft: str = "graft",
    requests: int = 3,
    questions: Sequence[Question] = (),
) -> Deployed:
    """Deploy a release to where it is served: this project, one on another machine, or a store at a URL."""
    if to == HERE:
        return deploy_here(work, name, alias=alias, requests=requests, questions=questions)
    release = find_release(work.releases, name)
    full = full_alias(work, alias, model=release.model)
    if "://" in to:
        push_to_url(work, release.id, url=to)
        return Deployed(release=release.id, alias=full, to=to, previous=None, ok=True, asked=0)
    target = parse_target(to)
    remote_store = SshTarget(target.host, f"{target.folder.rstrip('/')}/.graft/releases")
    push_over_ssh(open_store(work), release.id, target=remote_store, progress=report_bytes(work.reporter))
    command = (*shlex.split(graft), "release", "deploy", release.id, "--alias", full)
    options = ("--requests", str(requests), "--questions", "-", "--json")
    report = _run_there(target, (*command, *options), json.dumps([list(question) for question in questions]))
    return Deployed.model_validate(report).model_copy(update={"to": to})


def _run_there(target: SshTarget, command: Sequence[str], stdin_text: str) -> dict[str, Any]:
    """Run graft in the project on the serving machine; what it printed as JSON."""
    script = f"cd -- {shlex.quote(target.folder)} && exec {shlex.join(command)}"
    where = f"{target.host}:{target.folder}"
    try:
        done = subprocess.run(
            [*ssh_command(), target.host, f"sh -c {shlex.quote(script)}"],
            input=stdin_text.encode(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise EnvironmentFailure(
            "ssh cannot be started", why=str(error), fix="install an SSH client"
        ) from error
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        report = {}
    if done.returncode in (EXIT_DONE, EXIT_NEGATIVE_RESULT) and "release" in report:
        return report
    raise _explain(done.returncode, report, done.stderr.decode(errors="replace"), where)


def _explain(code: int, report: dict[str, Any], errors: str, where: str) -> GraftError:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no output")[:300]
    if code == UNREACHED:
        return EnvironmentFailure(
            f"the serving machine cannot be reached: {last}",
            fix="make ssh work without a prompt",
            where=where,
        )
    return EnvironmentFailure(
        f"the serving machine did not take the release: {report.get('what') or last}",
        why=str(report.get("why", "")) or f"`graft` there ended with {code}",
        fix=str(report.get("fix", "")) or "install graftwork there, with a graft.yaml of the same project",
        where=where,
    )
