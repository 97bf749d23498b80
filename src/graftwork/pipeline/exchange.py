"""Releases out of the project as archives, and into it from archives and PEFT folders.

In: an open project and a path. Out: the archive, or the release in store and index. A release is in the
index only when its files are in the store, and nobody can collect it in between.
"""

from pathlib import Path
from typing import NamedTuple

from graftwork.model.base import copy_base, loadable_name
from graftwork.pipeline.exchange_pace import tell_bytes
from graftwork.pipeline.gate import find_verdict
from graftwork.pipeline.open_project import OpenProject, load_template, timestamp
from graftwork.pipeline.release_store import open_store
from graftwork.records.errors import UserMistake
from graftwork.records.release import Release
from graftwork.registry.exchange.archive import Exported, read_archive, write_archive
from graftwork.registry.exchange.peft import Ground, take_peft_folder
from graftwork.registry.licence import find_licence
from graftwork.registry.promote import find_release
from graftwork.registry.refusals import wrong_project


class Imported(NamedTuple):
    """`remarks` say what whoever imported it should know."""

    release: Release
    version: str | None
    new: bool
    remarks: tuple[str, ...] = ()


def export_release(work: OpenProject, name: str, *, target: Path | None = None) -> Exported:
    """Write a release as an archive; by default beside the project's own files."""
    release = find_release(work.releases, name)
    path = target or work.project.root
    if path.is_dir():
        path /= f"{release.project}-{release.id[:12]}.tar"
    return write_archive(open_store(work), release.id, target=path, tell=tell_bytes(work.reporter))


def export_base(work: OpenProject, name: str, *, target: Path) -> int:
    """Write the exact base weights of a release as a folder; the number of bytes comes back."""
    release = find_release(work.releases, name)
    if release.base_fingerprint != work.base.revision:
        raise UserMistake(
            f"release {release.id[:12]} was trained on another base than this project has now",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="export the base from a project, or with a --model, that has it",
            where="--base",
        )
    return copy_base(work.base, target)


def import_release(work: OpenProject, path: Path) -> Imported:
    """Take in an archive of a release, or a PEFT folder."""
    return _import_folder(work, path) if path.is_dir() else _import_archive(work, path)


def enter(work: OpenProject, release: Release, *, new: bool, remarks: tuple[str, ...] = ()) -> Imported:
    """Enter what lies in the store; hold the store's `adding()` around both."""
    work.releases.add(release)
    return Imported(release, work.releases.entry(release.id).version, new, remarks)


def require_own_project(work: OpenProject, release: Release, *, where: str) -> None:
    """Before anything is stored: the index takes releases of its own project only."""
    if release.project != work.settings.project:
        raise wrong_project(release, work.settings.project, where=where)


def _import_archive(work: OpenProject, path: Path) -> Imported:
    store, tell = open_store(work), tell_bytes(work.reporter)
    with store.adding(), read_archive(path, store=store, tell=tell) as unpacked:
        require_own_project(work, unpacked.release, where=str(path))
        arrived = unpacked.put_into(store, tell=tell)
        return enter(work, arrived.release, new=arrived.new)


def _import_folder(work: OpenProject, folder: Path) -> Imported:
    base, template = work.base, load_template(work)
    ground = Ground(
        project=work.settings.project,
        model=work.model,
        base=base.name,
        base_fingerprint=base.revision,
        template_fingerprint=template.template_fingerprint,
        tokenizer_fingerprint=template.tokenizer_fingerprint,
        licence=find_licence(Path(base.folder)),
    )
    store = open_store(work)
    taken = take_peft_folder(
        folder,
        ground=ground,
        created_at=timestamp(),
        versions={},
        find_verdict=lambda weights: find_verdict(work, weights),
    )
    remarks = [
        "nothing was measured: `graft eval --subject base --subject release:ID` compares it, and "
        "`graft release promote --force --reason …` takes it as it is"
    ]
    if taken.release.decision != "not_enough_evidence":
        remarks.insert(0, f"the same weights were judged here before: {taken.release.decision}")
    if taken.named_base and taken.named_base not in (base.name, loadable_name(base.name)):
        remarks.append(
            f"the adapter says that it is for {taken.named_base}; it is taken to be for {base.name}"
        )
    if taken.left:
        remarks.append(f"left out: {', '.join(taken.left)}")
    with store.adding():
        new = not store.has(taken.release.id)
        release = store.put(taken.release, sources=taken.sources, tell=tell_bytes(work.reporter))
        return enter(work, release, new=new, remarks=tuple(remarks))
