"""Puts a release into service: verify, move the alias, wait for the endpoint, ask it, go back if it fails.

In: a release that is in the store, here or on the serving machine. Out: a `Deployed`. The endpoint loads the
release before requests go to it, and answers that are under way end on the old one. If one of the first
requests fails, the alias points at the old release again.
"""

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_transfer import add_to_index, push_to_url, report_bytes, require_own_project
from graftwork.pipeline.releases import full_alias, open_store, promote_release, roll_back_release
from graftwork.process.http_client import NoAnswer
from graftwork.process.ssh import UNREACHED, ssh_command
from graftwork.process.worker import lock_holder
from graftwork.records.base import Record
from graftwork.records.errors import EXIT_ANSWER_IS_NO, EXIT_DONE, EnvironmentLacks, GraftError
from graftwork.records.interaction import TRY_OUT_SESSION
from graftwork.registry.index import find_release
from graftwork.registry.transfer.ssh import SshTarget, parse_target, push_over_ssh
from graftwork.serve.own_endpoint import OwnEndpoint
from graftwork.serve.reload import gateway_folder

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
    move = promote_release(work, release.id, alias=alias, reason="deployed").move
    previous = move.previous if move is not None else release.id
    found = Deployed(release=release.id, alias=full, to=HERE, previous=previous, ok=True, asked=0)
    if not requests:
        return found
    if (lock_holder(gateway_folder(work.project.serving)) or 0) <= 0:
        return found.model_copy(update={"why": "no endpoint runs here: nothing was asked"})
    asked = [*questions, *[GREETING] * requests][:requests]
    answered, failure = _ask(work, full, release.id, asked, wait_seconds=wait_seconds)
    found = found.model_copy(update={"asked": answered, "why": failure})
    if not failure:
        return found
    reason = f"first requests failed: {failure}"
    moved = previous is not None and previous != release.id
    # A release that somebody promoted meanwhile stays.
    taken_back = moved and roll_back_release(work, release.id, alias=alias, reason=reason) is not None
    return found.model_copy(update={"ok": False, "taken_back": taken_back})


def _ask(
    work: OpenProject, alias: str, release: str, questions: Sequence[Question], *, wait_seconds: float
) -> tuple[int, str]:
    """How many answers came from the release, and what failed."""
    deadline, answered = time.monotonic() + wait_seconds, 0
    while answered < len(questions):
        by, failure = _ask_once(work, alias, questions[answered])
        if failure:
            return answered, failure
        if by == release:
            answered += 1
        elif time.monotonic() > deadline:
            return answered, f"after {wait_seconds:.0f} s {alias} is still answered by {by[:12] or 'another'}"
        else:
            time.sleep(POLL_SECONDS)
    return answered, ""


def _ask_once(work: OpenProject, alias: str, question: Question) -> tuple[str, str]:
    """The release that answered, or why there was no answer."""
    body = {"model": alias, "messages": list(question), "max_tokens": 32, "temperature": 0}
    endpoint = OwnEndpoint(work.settings.serve, root=work.project.root)
    answering = endpoint.send(
        "/v1/chat/completions",
        body,
        seconds=ANSWER_SECONDS,
        longest=LONGEST_ANSWER,
        headers={"x-session-id": TRY_OUT_SESSION},
    )
    try:
        with answering as answer:
            text = answer.read()
            if answer.status == 503 and b"model_not_loaded" in text:
                return "", ""
            if answer.status != 200:
                return "", f"the endpoint answered with status {answer.status}: {_reason(text)}"
            by = answer.header("x-graft-release") or ""
            return by, "" if _is_completion(text) else "the endpoint's answer is no chat completion"
    except NoAnswer as error:
        return "", f"the endpoint gave no answer: {error}"


def _reason(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")


def _is_completion(text: bytes) -> bool:
    """Whether it is an answer, of whatever length: how good answers are is the gate's question."""
    try:
        return isinstance(json.loads(text)["choices"][0]["message"], dict)
    except (ValueError, KeyError, TypeError, IndexError):
        return False


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
    """Bring a release to where it is served: this project, one on another machine, or a store at a URL."""
    if to == HERE:
        return deploy_here(work, name, alias=alias, requests=requests, questions=questions)
    release = find_release(work.releases, name)
    full = full_alias(work, alias, model=release.model)
    if "://" in to:
        push_to_url(work, release.id, url=to)
        return Deployed(release=release.id, alias=full, to=to, previous=None, ok=True, asked=0)
    target = parse_target(to)
    there = SshTarget(target.host, f"{target.folder.rstrip('/')}/.graft/releases")
    push_over_ssh(open_store(work), release.id, target=there, progress=report_bytes(work.reporter))
    words = (*shlex.split(graft), "release", "deploy", release.id, "--alias", full)
    options = ("--requests", str(requests), "--questions", "-", "--json")
    found = _run_there(target, (*words, *options), json.dumps([list(question) for question in questions]))
    return Deployed.model_validate(found).model_copy(update={"to": to})


def _run_there(target: SshTarget, words: Sequence[str], given: str) -> dict[str, Any]:
    """Run graft in the project on the serving machine; what it printed as JSON."""
    script = f"cd -- {shlex.quote(target.folder)} && exec {shlex.join(words)}"
    where = f"{target.host}:{target.folder}"
    try:
        done = subprocess.run(
            [*ssh_command(), target.host, f"sh -c {shlex.quote(script)}"],
            input=given.encode(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise EnvironmentLacks(
            "ssh cannot be started", why=str(error), fix="install an SSH client"
        ) from error
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        found = {}
    if done.returncode in (EXIT_DONE, EXIT_ANSWER_IS_NO) and "release" in found:
        return found
    raise _explain(done.returncode, found, done.stderr.decode(errors="replace"), where)


def _explain(code: int, found: dict[str, Any], errors: str, where: str) -> GraftError:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no output")[:300]
    if code == UNREACHED:
        return EnvironmentLacks(
            f"the serving machine cannot be reached: {last}", fix="make ssh work without asking", where=where
        )
    return EnvironmentLacks(
        f"the serving machine did not take the release: {found.get('what') or last}",
        why=str(found.get("why", "")) or f"`graft` there ended with {code}",
        fix=str(found.get("fix", "")) or "install graftwork there, with a graft.yaml of the same project",
        where=where,
    )
