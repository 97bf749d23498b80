"""`graft release show`, `verify`, `log`: one release, its bytes, the moves of an alias."""

from graftwork.cli.output import Json
from graftwork.cli.release_project import Alias, Name, opened, opened_aloud
from graftwork.cli.steps import Folder, Model


def show_(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """One release: what it was made of, its verdict, version, tags and notes.

    Example:  graft release show champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_known
    from graftwork.pipeline.releases import read_verdict
    from graftwork.registry.aliases import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        entry, notes = work.releases.entry(release.id), work.releases.notes(release.id)
        verdict = read_verdict(work, release)
    if json:
        known = entry.model_dump(mode="json", include={"version", "tags", "aliases", "collected_at"})
        said = [note.model_dump(mode="json") for note in notes]
        found = None if verdict is None else verdict.model_dump(mode="json")
        print_json({**release.model_dump(mode="json"), **known, "notes": said, "verdict": found})
        return
    show_known(stdout, release, entry, notes)
    for line in () if verdict is None else (verdict.reason, *(rule.sentence for rule in verdict.rules)):
        stdout.print(f"  {line}", highlight=False, markup=False)


def verify(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """Check every byte of a release, and its signature where graft.yaml names a key.

    Example:  graft release verify champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import report_bytes
    from graftwork.pipeline.releases import open_store
    from graftwork.registry.aliases import find_release

    with opened_aloud(project) as work:
        found = find_release(work.releases, name)
        release = open_store(work).verify(found.id, tell=report_bytes(work.narrator))
        signed = work.settings.release.public_key is not None
    size = sum(file.size for file in release.files)
    if json:
        print_json(
            {"id": release.id, "files": len(release.files), "bytes": size, "signature_checked": signed}
        )
    else:
        words = "and its signature hold" if signed else "hold"
        stdout.print(
            f"{release.id[:12]}: all {len(release.files)} files ({size:,} bytes) {words}", highlight=False
        )


def log(alias: Alias = None, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Every move of an alias: who, when, why, and on which verdict.

    Example:  graft release log --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_log
    from graftwork.pipeline.releases import full_alias

    with opened(project, model) as work:
        full = full_alias(work, alias)
        moves = work.releases.alias_log(full)
        decisions = {release.id: release.decision for release in work.releases.list()}
    if json:
        print_json({"alias": full, "moves": [move.model_dump(mode="json") for move in moves]})
    else:
        show_log(stdout, full, moves, decisions=decisions)
