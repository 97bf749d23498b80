"""Push releases to the Hugging Face Hub and pull them back, through its own client.

A push is one commit whose files have the hashes in the manifest; a pull is verified like any other release.
Files that the Hub has are not sent again. The token comes from HF_TOKEN and appears in no message;
HF_ENDPOINT names another server. A push goes over LFS even if hf_xet is installed: over Xet the client splits
it into several commits. Tested against a local server that implements the Hub's protocol, not against the Hub
itself.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from graftwork.files.disk import file_digest
from graftwork.process.pieces import CallThread
from graftwork.records.errors import (
    Corrupted,
    EnvironmentFailure,
    GraftError,
    UserError,
    needs_extra,
)
from graftwork.records.release import Release, ReleaseFile
from graftwork.registry.folder import (
    MANIFEST,
    METADATA_FILES,
    MINISIGN,
    SIGSTORE,
    ProgressCallback,
    ProgressCounter,
    ProgressReader,
    no_progress,
    parse_manifest,
    require_own_files,
)
from graftwork.registry.store import (
    LARGEST_MANIFEST,
    LARGEST_SIGNATURE,
    ReceivedRelease,
    ReleaseStore,
    staging_folder,
)
from graftwork.text.redact import redact_variables


def matches_content(info: Any, content: bytes) -> bool:
    """Whether the Hub's record of a file describes this content."""
    if info.lfs is not None:
        return bool(info.lfs.sha256 == hashlib.sha256(content).hexdigest())
    return bool(info.blob_id == git_hash(content))


def git_hash(content: bytes) -> str:
    """The id of a git blob with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def quiet_client() -> Iterator[None]:
    """Silence the warning that open files do not go over Xet, which is why we use them."""
    log = logging.getLogger("huggingface_hub._commit_api")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class DownloadTooLarge(OSError):
    """More bytes were received than the file may have."""


def progress_bar_class(count: ProgressCounter, *, largest: int) -> Any:
    """A progress bar class for the client that draws nothing, counts bytes and stops oversized downloads.

    The client itself compares lengths only at the end, when the disk may be full.
    """
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class CountingBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})
            self._arrived = 0

        def update(self, n: float | None = 1) -> bool | None:
            self._arrived += int(n or 0)
            if self._arrived > largest:
                raise DownloadTooLarge(f"more than {largest:,} bytes were received")
            count.add(int(n or 0))
            return None

    return CountingBar


TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"
ANSWER_SECONDS = 300.0
SLOWEST = 16 * 2**10
"""Bytes per second: a transfer that is slower on average is aborted."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class Hub:
    """One repository on the Hub."""

    def __init__(self, repository: str, *, endpoint: str | None = None) -> None:
        if not _REPOSITORY.fullmatch(repository):
            raise UserError(
                f"{repository[:80]!r} is not a repository", fix="write it like owner/name", where="--hub"
            )
        self.repository = repository
        self._token = os.environ.get(TOKEN)
        self._endpoint = endpoint
        with needs_extra("train"):
            from huggingface_hub import HfApi
        # False: never use a token from a file on this machine.
        self._api: Any = HfApi(endpoint=endpoint, token=self._token or False)
        self._apart = CallThread("the Hub's client")

    def push(
        self, store: ReleaseStore, release_id: str, *, progress: ProgressCallback = no_progress
    ) -> tuple[str, str]:
        """Verify here, send in one commit, and check the hashes that the Hub then has. Returns the immutable
        revision that holds the release, and the tag that names it."""
        if not self._token:
            raise EnvironmentFailure(
                "no token for the Hub",
                why=f"{TOKEN} is not set",
                fix=f"create a token with write access at the Hub and set {TOKEN}",
            )
        with store.shared_lock():
            release, folder = store.verify(release_id, progress=progress), store.folder(release_id)
            # The manifest has no hashes of these files, so they are compared with what is read here.
            metadata = {
                path.name: path.read_bytes()
                for path in sorted(folder.iterdir())
                if path.name in METADATA_FILES
            }
            self._call(lambda: self._api.create_repo(self.repository, private=True, exist_ok=True))
            tag = release.id[:12]
            # The commit of the tag.
            refs = self._call(lambda: self._api.list_repo_refs(self.repository))
            tagged = next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None)
            # Pushing an unsigned copy keeps the signatures of the same manifest that are there; those at the
            # tag of the release win.
            signatures: dict[str, bytes] = {}
            for revision in ("main", *filter(None, [tagged])):
                infos = self._infos([MANIFEST], revision)
                if infos and matches_content(infos[0], metadata[MANIFEST]):
                    with tempfile.TemporaryDirectory() as scratch:
                        signatures |= self._signatures(revision, Path(scratch))
            metadata = signatures | metadata
            commit = self._commit(release, folder, metadata, progress)
            self._require_hashes(release, folder, metadata, commit=commit)
        # The Hub can only delete and create a tag; after a kill in between, the next push creates it.
        if tagged != commit:
            if tagged is not None:
                self._call(lambda: self._api.delete_tag(self.repository, tag=tag))
            self._call(lambda: self._api.create_tag(self.repository, tag=tag, revision=commit, exist_ok=True))
        return commit, tag

    def _signatures(self, revision: str, folder: Path) -> dict[str, bytes]:
        paths = {
            name: self._download(name, revision, folder, largest=LARGEST_SIGNATURE)
            for name in (MINISIGN, SIGSTORE)
        }
        return {name: path.read_bytes() for name, path in paths.items() if path is not None}

    def _commit(
        self, release: Release, folder: Path, metadata: dict[str, bytes], progress: ProgressCallback
    ) -> str:
        """One commit with all files of the release and without the signatures of another one."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        absent = [name for name in (MINISIGN, SIGSTORE) if name not in metadata]
        operations: list[Any] = [
            CommitOperationDelete(info.path) for info in (self._infos(absent, "main") if absent else ())
        ]
        operations += [CommitOperationAdd(name, content) for name, content in metadata.items()]
        with ExitStack() as open_files:
            # Open files, not paths: the client sends them over LFS, and their bytes can be counted.
            readers = [
                (file.path, open_files.enter_context(ProgressReader(folder / file.path)))
                for file in release.files
            ]
            operations += [CommitOperationAdd(name, reader) for name, reader in readers]
            count = ProgressCounter(progress, "send", sum(file.size for file in release.files))
            for _, reader in readers:
                reader.begin(count)
            with quiet_client():
                done = self._call(
                    lambda: self._api.create_commit(
                        self.repository, operations, commit_message=f"release {release.id}"
                    ),
                    carried=sum(file.size for file in release.files),
                )
            count.finish()
        return str(done.oid)

    def read(self, revision: str, folder: Path) -> tuple[Release, str]:
        """The checked manifest at a revision, and the commit of the revision."""
        commit = str(self._call(lambda: self._api.model_info(self.repository, revision=revision)).sha)
        path = self._download(MANIFEST, commit, folder, largest=LARGEST_MANIFEST)
        if path is None:
            raise self._damaged("there is no manifest at this revision", "it is not a release")
        release = parse_manifest(path.read_bytes(), self._damaged)
        require_own_files(release, self._damaged)
        return release, commit

    def pull(
        self,
        store: ReleaseStore,
        *,
        revision: str = "main",
        allow: Callable[[Release], None],
        progress: ProgressCallback = no_progress,
    ) -> ReceivedRelease:
        """Fetch a release into the store. `allow` raises if it is not wanted."""
        with staging_folder(store.root) as folder:
            release, commit = self.read(revision, folder)
            allow(release)
            signatures = self._signatures(commit, folder)
            total = 0 if store.has(release.id) else sum(file.size for file in release.files)
            count = ProgressCounter(progress if total else no_progress, "fetch", total)
            arrived = 0

            def fetch(file: ReleaseFile, _path: Path) -> Path:
                nonlocal arrived
                path = self._download(file.path, commit, folder, largest=file.size, count=count)
                if path is None or file_digest(path) != file.sha256:
                    raise self._damaged(
                        f"{file.path} is missing or does not match its hash in the manifest",
                        f"expected sha256 {file.sha256[:12]}…",
                    )
                arrived += file.size
                # The client reports no progress for small files.
                count.reach(arrived)
                return path

            return store.receive(release, signatures=signatures, fetch=fetch, progress=progress)

    def _require_hashes(
        self, release: Release, folder: Path, metadata: dict[str, bytes], *, commit: str
    ) -> None:
        """Check that the Hub has what the manifest names."""
        hashes = {file.path: file.sha256 for file in release.files}
        hashes |= {name: hashlib.sha256(content).hexdigest() for name, content in metadata.items()}
        infos = {info.path: info for info in self._infos(sorted({*hashes, *METADATA_FILES}), commit)}
        if unexpected := sorted(infos.keys() - hashes.keys()):
            raise self._damaged(f"{unexpected[0]} is in the commit", "it belongs to another release")
        for name, sha256 in hashes.items():
            info = infos.get(name)
            if info is None:
                raise self._damaged(f"{name} is not in the commit", "the Hub did not accept it")
            if info.lfs is not None:
                same = info.lfs.sha256 == sha256
            else:
                # Of a small file the Hub only knows the git hash: compare it with that of the right bytes.
                content = metadata[name] if name in metadata else (folder / name).read_bytes()
                same = hashlib.sha256(content).hexdigest() == sha256 and matches_content(info, content)
            if not same:
                raise self._damaged(f"{name} has a different hash on the Hub", "it was changed in transit")

    def _download(
        self, name: str, commit: str, folder: Path, *, largest: int, count: ProgressCounter | None = None
    ) -> Path | None:
        """None if the commit does not have it. Its size is asked first."""
        infos = self._infos([name], commit)
        if not infos:
            return None
        if infos[0].size > largest:
            raise self._damaged(f"{name} is larger than it may be", f"{infos[0].size:,} bytes")
        bar = progress_bar_class(count or ProgressCounter(no_progress, "", 0), largest=largest)
        path = self._call(
            lambda: self._api.hf_hub_download(
                self.repository, name, revision=commit, local_dir=folder, tqdm_class=bar
            ),
            carried=infos[0].size,
        )
        return Path(path)

    def _infos(self, names: list[str], commit: str) -> list[Any]:
        return list(self._call(lambda: self._api.get_paths_info(self.repository, names, revision=commit)))

    def _call(self, ask: Callable[[], Any], *, carried: int = 0) -> Any:
        """Call the client. Its errors become ours, without token or login.

        `carried` is the number of bytes to transfer; the time limit grows with it.
        """
        try:
            return self._apart.call(ask, seconds=ANSWER_SECONDS + carried / SLOWEST)
        except GraftError:
            raise
        except Exception as error:
            # The token that the client was made with, even if the environment changed since.
            environment = {TOKEN: self._token or "", ENDPOINT: self._endpoint or os.environ.get(ENDPOINT, "")}
            message = redact_variables(
                str(error) or type(error).__name__, environment=environment, variables=tuple(environment)
            )
            raise EnvironmentFailure(
                f"the request to the Hub failed: {message}",
                why="it is not responding, or does not allow this",
                fix=f"check the repository and that {TOKEN} may write there, then try again: "
                "files that have arrived are not sent again",
                where=self.repository,
            ) from None

    def _damaged(self, what: str, why: str) -> Corrupted:
        return Corrupted(
            what, why=why, fix="push the release again from a machine that has it", where=self.repository
        )
