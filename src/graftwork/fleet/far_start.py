"""Start a job where a provider gives folders of files: `python start.py --manifest FILE --blobs FOLDER …`.

Input: the manifest of a bundle and its files, each named by its SHA-256. Output: what the bundle's bootstrap
leaves in the work folder; with `--out` or `--hub`, copied there while it runs, `exit.json` last. Secrets come
from the provider's own store into the environment of the job (`load_secrets`). A file or a flag at the
provider stops the job. Uses the standard library, and where the options ask for them huggingface_hub, boto3
and Kaggle's packages, which are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

EXIT_FILE = "exit.json"
STOP_FILE = "stop"
COPY_SECONDS = 10.0
HUB_SECONDS = 300.0
"""Seconds between two commits: the Hub limits the number of commits an hour."""
ENVIRONMENT = 3
FULL = (28, 122)
"""Error numbers of a full disk and an exceeded quota."""
LAST_TRIES = 5
FIX = "run it again; the log of the job has more"
VAULT = "https://vault.azure.net"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put a bundle together and run it.")
    parser.add_argument("--manifest", type=Path, required=True, help="bundle.json")
    parser.add_argument("--blobs", type=Path, action="append", required=True, help="files named by hash")
    parser.add_argument("--work", type=Path, required=True, help="where the job works; kept for a resume")
    parser.add_argument("--scratch", type=Path, required=True, help="for the bundle and installed packages")
    parser.add_argument("--seconds", type=float, required=True, help="time limit")
    parser.add_argument("--label", required=True, help="the name of the job")
    parser.add_argument("--out", type=Path, help="a mounted folder that gets copies of the results")
    parser.add_argument("--hub", help="a dataset repository of the Hub that gets copies of the results")
    parser.add_argument("--flag", help="a dataset of Kaggle whose existence stops the job")
    parser.add_argument("--secrets", default="", help="kaggle:NAME,NAME, aws:ID or azure:ADDRESS")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    carrier: Carrier = Carrier()
    if options.out is not None:
        carrier = FolderCarrier(options.out)
    elif options.hub:
        carrier = HubCarrier(options.hub, f"jobs/{options.label}")
    elif options.flag:
        carrier = KaggleFlag(options.flag)
    try:
        # Go on from what an earlier attempt of this job has copied: its machine may be gone.
        if options.out is not None and (options.out / "run").is_dir() and not (options.work / "run").exists():
            ignored = shutil.ignore_patterns(EXIT_FILE)
            shutil.copytree(options.out, options.work, dirs_exist_ok=True, ignore=ignored)
        bundle = assemble(options.manifest, options.blobs, options.scratch / "bundle")
        environment = {**os.environ, **load_secrets(options.secrets), "GRAFT_FLEET_JOB": options.label}
    except Exception as error:  # whatever a provider's secret store may raise
        report_failure(options.work, error)
    else:
        command_line = [sys.executable, str(bundle / "bootstrap.py"), "--bundle", str(bundle)]
        command_line += ["--work", str(options.work)]
        command_line += ["--seconds", str(options.seconds), "--cache", str(options.scratch)]
        run(command_line, options.work, carrier, environment)
    carrier.carry(options.work, last=True)
    # The outcome is in exit.json. Another exit code would make some providers start the job again.
    return 0 if (options.work / EXIT_FILE).exists() else 1


def assemble(manifest: Path, folders: list[Path], target: Path) -> Path:
    """The folder of the bundle, made of links to the blobs."""
    blobs = {path.name: path for folder in folders for path in folder.rglob("*") if path.is_file()}
    files = json.loads(manifest.read_bytes())["files"]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copyfile(manifest, target / "bundle.json")
    for name, file in files.items():
        if file["sha256"] not in blobs:
            raise ValueError(f"{name} of the bundle did not arrive; send it again")
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(blobs[file["sha256"]].resolve())
    return target


def load_secrets(source: str) -> dict[str, str]:
    """Secrets by the provider's own mechanism; nothing of them is printed."""
    kind, _, detail = source.partition(":")
    if kind == "kaggle":
        from kaggle_secrets import UserSecretsClient  # type: ignore[import-not-found]

        client = UserSecretsClient()
        return {name: str(client.get_secret(name)) for name in detail.split(",") if name}
    if kind == "aws":
        import boto3

        secret = boto3.client("secretsmanager").get_secret_value(SecretId=detail)
        secrets: dict[str, str] = json.loads(secret["SecretString"])
        return secrets
    if kind == "azure":
        return read_vault(detail)
    return {}


def read_vault(address: str) -> dict[str, str]:
    """The secret at an address of Key Vault, by the identity that Azure gives to the job."""
    from urllib.parse import urlencode
    from urllib.request import Request, urlopen

    variables = os.environ
    query, headers = {"resource": VAULT}, {}
    if "OBO_ENDPOINT" in variables:
        endpoint = variables["OBO_ENDPOINT"]
    elif "IDENTITY_ENDPOINT" in variables:
        endpoint, query["api-version"] = variables["IDENTITY_ENDPOINT"], "2019-08-01"
        headers = {"X-IDENTITY-HEADER": variables.get("IDENTITY_HEADER", "")}
    elif "MSI_ENDPOINT" in variables:
        endpoint, query["api-version"] = variables["MSI_ENDPOINT"], "2017-09-01"
        query["clientid"] = variables.get("DEFAULT_IDENTITY_CLIENT_ID", "")
        headers = {"secret": variables.get("MSI_SECRET", "")}
    else:
        raise ValueError("the machine has no identity to read the secrets with")
    with urlopen(Request(f"{endpoint}?{urlencode(query)}", headers=headers), timeout=60) as answer:
        token = json.load(answer)["access_token"]
    request = Request(f"{address}?api-version=7.4", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=60) as answer:
        secrets: dict[str, str] = json.loads(json.load(answer)["value"])
    return secrets


def report_failure(work: Path, failure: Exception) -> None:
    """Write what, why and fix where a reader looks for them."""
    what, fix = f"the job could not be started: {type(failure).__name__}: {failure}", FIX
    if isinstance(failure, OSError) and failure.errno in FULL:
        what, fix = "the disk of the machine is full", "order more disk, or free some where the job works"
    print(what, file=sys.stderr)
    error = {"error": "EnvironmentFailure", "what": what, "why": str(failure), "fix": fix}
    with contextlib.suppress(OSError):
        (work / "run").mkdir(parents=True, exist_ok=True)
        (work / "run" / "error.json").write_text(json.dumps({**error, "exit_code": ENVIRONMENT}))
        (work / EXIT_FILE).write_text(json.dumps({"code": ENVIRONMENT, "reason": what, "at": 0}))


class Carrier:
    """Base class that copies nothing: the work folder is the provider's."""

    seconds = COPY_SECONDS

    def carry(self, work: Path, *, last: bool = False) -> None:
        """Copy what has changed; `exit.json` only with the `last` copy."""

    def wants_stop(self) -> bool:
        return False


class FolderCarrier(Carrier):
    """Copies to a mounted folder, which may know neither renaming nor links."""

    pause = 2.0
    """Seconds before the last copy is tried again; twice as long each time."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._seen: dict[str, tuple[int, int]] = {}

    def carry(self, work: Path, *, last: bool = False) -> None:
        """A folder that is full or gone does not end the job: the copy is retried."""
        for attempt in range(LAST_TRIES if last else 1):
            try:
                self._copy(work, last=last)
            except OSError as error:
                print(f"the results could not be copied to {self._out}: {error}", flush=True)
                threading.Event().wait(self.pause * 2**attempt if last else 0)
            else:
                return

    def _copy(self, work: Path, *, last: bool) -> None:
        for name, path in results(work):
            if name == EXIT_FILE and not last:
                continue
            try:
                stamp = (path.stat().st_size, path.stat().st_mtime_ns)
                content = path.open("rb")
            except FileNotFoundError:  # it was removed since it was listed
                continue
            with content:
                if self._seen.get(name) != stamp:
                    (self._out / name).parent.mkdir(parents=True, exist_ok=True)
                    with (self._out / name).open("wb") as target:
                        shutil.copyfileobj(content, target)
                    self._seen[name] = stamp

    def wants_stop(self) -> bool:
        try:
            return (self._out.parent / STOP_FILE).exists()
        except OSError:  # the folder is gone for now
            return False


class HubCarrier(Carrier):
    """Commits to a dataset repository, by the token in HF_TOKEN."""

    seconds = 60.0

    def __init__(self, repository: str, path: str) -> None:
        self._repository, self._path = repository, path
        self._carried = time.monotonic()

    def carry(self, work: Path, *, last: bool = False) -> None:
        if not last and time.monotonic() - self._carried < HUB_SECONDS:
            return
        from huggingface_hub import HfApi

        self._carried = time.monotonic()
        ignored = [".*", "**/.*", "run/lock", *([] if last else [EXIT_FILE])]
        for attempt in range(LAST_TRIES if last else 1):
            try:
                HfApi().upload_folder(
                    repo_id=self._repository,
                    repo_type="dataset",
                    folder_path=work,
                    path_in_repo=f"{self._path}/out",
                    ignore_patterns=ignored,
                    commit_message="files of a job",
                )
            except Exception as error:  # whatever a network library may raise
                print(f"the Hub did not accept the files: {type(error).__name__}", flush=True)
                threading.Event().wait(2.0**attempt if last else 0)
            else:
                return

    def wants_stop(self) -> bool:
        from huggingface_hub import HfApi

        try:
            return HfApi().file_exists(self._repository, f"{self._path}/{STOP_FILE}", repo_type="dataset")
        except Exception:  # whatever a network library may raise
            return False


class KaggleFlag(Carrier):
    """Carries nothing, and looks for a dataset: sessions of Kaggle cannot be stopped from outside."""

    seconds = 60.0

    def __init__(self, dataset: str) -> None:
        self._owner, _, self._slug = dataset.partition("/")

    def wants_stop(self) -> bool:
        try:
            from kagglesdk import KaggleClient
            from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetStatusRequest

            request = ApiGetDatasetStatusRequest()
            request.owner_slug, request.dataset_slug = self._owner, self._slug
            with KaggleClient() as client:
                client.datasets.dataset_api_client.get_dataset_status(request)
        except Exception:  # there is none, or the network is down
            return False
        return True


def results(work: Path) -> Iterator[tuple[str, Path]]:
    """Files of the work folder that are whole; the outcome and the exit code come last."""
    # The job removes folders meanwhile, at which `rglob` fails and `walk` does not.
    listed = (Path(folder, name) for folder, _, names in os.walk(work) for name in names)
    files = [
        (path.relative_to(work).as_posix(), path)
        for path in listed
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(work).parts)
    ]
    late = {"run/outcome.json": 1, EXIT_FILE: 2}
    return iter(
        sorted((item for item in files if item[0] != "run/lock"), key=lambda i: (late.get(i[0], 0), i))
    )


def run(command: list[str], work: Path, carrier: Carrier, environment: dict[str, str]) -> None:
    """Run the bootstrap to its end; pass signals on, and copy its files meanwhile."""
    if carrier.wants_stop():
        (work / STOP_FILE).touch()
    child = subprocess.Popen(command, env=environment)

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        child.terminate()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, pass_on)
    while True:
        try:
            child.wait(carrier.seconds)
        except subprocess.TimeoutExpired:
            carrier.carry(work)
            if carrier.wants_stop():
                (work / STOP_FILE).touch()
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
