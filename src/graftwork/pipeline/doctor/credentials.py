"""Which credentials are present, and where from. Their values are never read further than to see that
there are any, and never shown.

In: the environment, the home folder, the project's folder. Out: checks.
"""

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from graftwork.pipeline.doctor.check import Check, Result


class Credential(NamedTuple):
    """One account: the variables that hold it, all of a group together, and the file it may lie in."""

    name: str
    groups: tuple[tuple[str, ...], ...]
    file: str | None
    purpose: str
    mark: str = ""
    """What the file must mention, where it holds others' as well."""


CREDENTIALS = (
    Credential(
        "Hugging Face",
        (("HF_TOKEN",), ("HUGGING_FACE_HUB_TOKEN",)),
        ".cache/huggingface/token",
        "gated models, uploads",
    ),
    Credential("RunPod", (("RUNPOD_API_KEY",),), ".runpod/config.toml", "jobs there"),
    Credential(
        "Kaggle",
        (("KAGGLE_USERNAME", "KAGGLE_KEY"), ("KAGGLE_API_TOKEN",)),
        ".kaggle/kaggle.json",
        "jobs there",
    ),
    Credential(
        "AWS",
        (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_PROFILE",), ("AWS_WEB_IDENTITY_TOKEN_FILE",)),
        ".aws/credentials",
        "SageMaker, a mirror at s3://",
    ),
    Credential(
        "Google Cloud",
        (("GOOGLE_APPLICATION_CREDENTIALS",),),
        ".config/gcloud/application_default_credentials.json",
        "a mirror at gs://",
    ),
    Credential("Weights & Biases", (("WANDB_API_KEY",),), ".netrc", "tracking", mark="api.wandb.ai"),
    Credential("MLflow", (("MLFLOW_TRACKING_URI",),), None, "tracking on a server"),
)


def look_at_credentials(
    environment: Mapping[str, str], *, home: Path, project: Path | None, wanted: frozenset[str]
) -> Iterator[Check]:
    """`wanted` names those that the settings ask for; for the others their absence is only worth a note."""
    written = _dotenv_names(project / ".env") if project is not None else frozenset()
    for credential in CREDENTIALS:
        yield _look(credential, environment, home=home, dotenv=written, wanted=credential.name in wanted)


def _look(
    credential: Credential,
    environment: Mapping[str, str],
    *,
    home: Path,
    dotenv: frozenset[str],
    wanted: bool,
) -> Check:
    name = f"{credential.name} account"
    for group in credential.groups:
        if all(environment.get(variable) for variable in group):
            return Check(name=name, result="ok", found=f"{' and '.join(group)}, from the environment")
    half = next((g for g in credential.groups if any(environment.get(one) for one in g)), None)
    if half is not None:
        lacking = ", ".join(one for one in half if not environment.get(one))
        return Check(
            name=name, result="note", found=f"incomplete: {lacking} is not set", fix=f"set {lacking} too"
        )
    if credential.file is not None and _holds(home / credential.file, credential.mark):
        return _from_file(name, home / credential.file)
    for group in credential.groups:
        if set(group) <= dotenv:
            return Check(
                name=name,
                result="note",
                found=f"{' and '.join(group)}, in .env only, which nothing here reads",
                fix="`set -a; . ./.env; set +a` before the command",
            )
    result: Result = "missing" if wanted else "note"
    fix = f"set {' and '.join(credential.groups[0])}" if wanted else ""
    return Check(name=name, result=result, found=f"none (for {credential.purpose})", fix=fix)


def _from_file(name: str, path: Path) -> Check:
    found = f"in ~/{path.name}" if path.parent == Path.home() else f"in {path}"
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check(
            name=name, result="note", found=f"{found}, which others can read", fix=f"chmod 600 {path}"
        )
    return Check(name=name, result="ok", found=found)


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
