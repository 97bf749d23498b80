"""Releases to the Hugging Face Hub and back, through its own client.

In: a store, a release, a repository. Out: a commit there whose files have the hashes that the manifest names;
or the release in the store, checked. What the Hub has is not sent again. The token comes from HF_TOKEN and is
said nowhere; HF_ENDPOINT names another server. Contract-tested against a local server that speaks the
Hub's protocol, not live-validated.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from graftwork.files.digest import file_digest
from graftwork.records.errors import Damaged, EnvironmentLacks, GraftError, UserMistake
from graftwork.records.release import Release
from graftwork.registry.exchange.archive import LARGEST_MANIFEST, LARGEST_SIGNATURE, Arrived
from graftwork.registry.exchange.incoming import incoming_folder
from graftwork.registry.folder import BESIDE, MANIFEST, MINISIGN, SIGSTORE
from graftwork.registry.names import FILE
from graftwork.registry.release import name_by_content
from graftwork.registry.store import ReleaseStore

TOKEN = "HF_TOKEN"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class OnHub(NamedTuple):
    """`commit` is the immutable revision that holds the release; `tag` names it."""

    release: Release
    repository: str
    commit: str
    tag: str


class Hub:
    """One repository on the Hub."""

    def __init__(self, repository: str, *, endpoint: str | None = None) -> None:
        if not _REPOSITORY.fullmatch(repository):
            raise UserMistake(
                f"{repository[:80]!r} is not a repository", fix="write it like owner/name", where="--hub"
            )
        self.repository = repository
        self._token = os.environ.get(TOKEN)
        self._endpoint = endpoint
        self._api = self._client()

    def push(self, store: ReleaseStore, release_id: str) -> OnHub:
        """Verify here, send in one commit, and check the hashes that the Hub then has."""
        if not self._token:
            raise EnvironmentLacks(
                "there is no token for the Hub",
                why=f"{TOKEN} is not set",
                fix=f"make a token that may write at the Hub and set {TOKEN}",
            )
        with store.adding():
            release, folder = store.verify(release_id), store.folder(release_id)
            self._asked(lambda: self._api.create_repo(self.repository, private=True, exist_ok=True))
            done = self._asked(
                lambda: self._api.upload_folder(
                    repo_id=self.repository, folder_path=folder, commit_message=f"release {release.id}"
                )
            )
            names = [path.name for path in folder.iterdir()]
            self._require_hashes(folder, names, commit=done.oid)
        tag = release.id[:12]
        self._asked(lambda: self._api.create_tag(self.repository, tag=tag, revision=done.oid, exist_ok=True))
        return OnHub(release, self.repository, done.oid, tag)

    def read(self, revision: str, folder: Path) -> tuple[Release, str]:
        """The manifest at a revision, proven, and the commit that the revision is."""
        commit = str(self._asked(lambda: self._api.model_info(self.repository, revision=revision)).sha)
        path = self._download(MANIFEST, commit, folder, largest=LARGEST_MANIFEST)
        if path is None:
            raise self._damaged("there is no manifest at this revision", "so it is no release of Graftwork")
        try:
            release = Release.from_json(path.read_bytes())
        except ValidationError as error:
            raise self._damaged("the manifest cannot be read", str(error).splitlines()[0]) from error
        if release.id != name_by_content(release):
            raise self._damaged("the manifest was changed", "its id is not the hash of its content")
        if any(not FILE.fullmatch(file.path) or file.path in BESIDE for file in release.files):
            raise self._damaged("the manifest names a file that no release may have", "it could lie anywhere")
        return release, commit

    def pull(
        self, store: ReleaseStore, *, revision: str = "main", allow: Callable[[Release], None]
    ) -> Arrived:
        """Fetch into the store, every byte checked. `allow` raises where the release is not wanted."""
        with incoming_folder(store.root) as folder:
            release, commit = self.read(revision, folder)
            allow(release)
            if store.has(release.id):
                return Arrived(store.verify_unsigned(release.id), new=False)
            sources: dict[str, Path | bytes] = {}
            for file in release.files:
                path = self._download(file.path, commit, folder, largest=file.size)
                if path is None or file_digest(path) != file.sha256:
                    raise self._damaged(
                        f"{file.path} is missing or has other bytes than its manifest says",
                        f"expected sha256 {file.sha256[:12]}…",
                    )
                sources[file.path] = path
            signatures = {}
            for name in (MINISIGN, SIGSTORE):
                found = self._download(name, commit, folder, largest=LARGEST_SIGNATURE)
                if found is not None:
                    signatures[name] = found.read_bytes()
            return Arrived(store.put(release, sources=sources, signatures=signatures), new=True)

    def _require_hashes(self, folder: Path, names: list[str], *, commit: str) -> None:
        found = {info.path: info for info in self._infos(names, commit)}
        for name in names:
            info = found.get(name)
            if info is None:
                raise self._damaged(f"{name} is not in the commit", "the Hub did not take it")
            if info.lfs is not None:
                same = info.lfs.sha256 == file_digest(folder / name)
            else:
                same = info.blob_id == _git_hash(folder / name)
            if not same:
                raise self._damaged(f"{name} has another hash there", "it did not arrive as it was sent")

    def _download(self, name: str, commit: str, folder: Path, *, largest: int) -> Path | None:
        """None where the commit does not have it. Its size is asked first."""
        infos = self._infos([name], commit)
        if not infos:
            return None
        if infos[0].size > largest:
            raise self._damaged(f"{name} is larger than it may be", f"{infos[0].size:,} bytes")
        path = self._asked(
            lambda: self._api.hf_hub_download(self.repository, name, revision=commit, local_dir=folder)
        )
        return Path(path)

    def _infos(self, names: list[str], commit: str) -> list[Any]:
        return list(self._asked(lambda: self._api.get_paths_info(self.repository, names, revision=commit)))

    def _client(self) -> Any:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise EnvironmentLacks(
                "the package huggingface_hub is not installed", fix='pip install "graftwork[train]"'
            ) from error
        # False: never the token that somebody left in a file on this machine.
        return HfApi(endpoint=self._endpoint, token=self._token or False)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Whatever the client raises becomes what, why and fix, without the token."""
        try:
            return ask()
        except GraftError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            # Before it is cut: the beginning of a token is still some of it.
            said = said.replace(self._token, "…") if self._token else said
            said = re.sub(r"\?[^\s'\"]+", "?…", said)[:300]
            raise EnvironmentLacks(
                f"the Hub did not do it: {said}",
                why="it does not answer, or does not allow it",
                fix=f"see whether the repository is right and {TOKEN} may write there, and try again: "
                "what was sent is not sent again",
                where=self.repository,
            ) from None

    def _damaged(self, what: str, why: str) -> Damaged:
        return Damaged(
            what, why=why, fix="push the release again from a machine that has it", where=self.repository
        )


def _git_hash(path: Path) -> str:
    """The name that git gives a file of this content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
