"""`graft release export`, `import`, `push` and `pull` as they are typed, between two projects of one name."""

import json
from pathlib import Path

import pytest
import typer
import yaml
from registry_samples import PROJECT, parts, publish_parts, verdict, write_adapter
from typer.testing import CliRunner

from graftwork.cli import release
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Corrupted, NegativeResult, UserError
from graftwork.registry.project import open_store

app = typer.Typer()
app.command("export")(release.export)
app.command("import")(release.import_)
app.command("push")(release.push)
app.command("pull")(release.pull)


class Place:
    """A project folder, and verbs typed in it."""

    def __init__(self, root: Path, **sections) -> None:
        self.root = root
        root.mkdir()
        settings = {"project": PROJECT, "data": {"logs": ["logs.jsonl"]}, **sections}
        (root / "graft.yaml").write_text(yaml.safe_dump(settings))

    def make(self, **changes) -> str:
        adapter = write_adapter(self.root / "adapter")
        with use_project(open_project(self.root), NullReporter()) as work:
            return publish_parts(
                folder=open_store(work), index=work.releases, **{**parts(adapter), **changes}
            ).id

    def known(self):
        with use_project(open_project(self.root), NullReporter()) as work:
            return {entry.id: entry.version for entry in work.releases.entries()}

    def type(self, *words: str) -> str:
        done = CliRunner().invoke(app, [*words, "-C", str(self.root)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    def ask(self, *words: str):
        return json.loads(self.type(*words, "--json"))


@pytest.fixture
def here(tmp_path) -> Place:
    return Place(tmp_path / "here")


@pytest.fixture
def there(tmp_path) -> Place:
    return Place(tmp_path / "there")


def test_an_archive_carries_a_release_to_another_machine(here, there, tmp_path):
    release = here.make()
    reported = here.ask("export", release[:10], "--to", str(tmp_path / "one.tar"))
    assert reported["id"] == release
    assert reported["bytes"] == (tmp_path / "one.tar").stat().st_size
    assert there.ask("import", reported["file"])["new"] is True
    assert there.ask("import", reported["file"])["new"] is False
    assert there.known() == {release: "1.0.0"}
    assert release[:12] in here.type("export", release)
    assert "already here" in there.type("import", reported["file"])


def test_a_release_of_another_project_leaves_nothing(here, tmp_path):
    release = here.make()
    here.ask("export", release, "--to", str(tmp_path / "one.tar"))
    other = Place(tmp_path / "other", project="another")
    with pytest.raises(UserError, match="belongs to project"):
        other.ask("import", str(tmp_path / "one.tar"))
    assert other.known() == {}
    assert not (other.root / ".graft" / "releases" / release).exists()


def test_a_store_at_a_url_takes_and_gives(here, there, tmp_path):
    release = here.make()
    url = f"file://{tmp_path}/shared"
    assert len(here.ask("push", release, "--to", url)["sent"]) == 8
    assert here.ask("push", release, "--to", url)["sent"] == []
    assert there.ask("pull", release[:8], "--from", url) == {
        "id": release,
        "version": "1.0.0",
        "new": True,
        "decision": "deploy",
    }
    assert there.known() == {release: "1.0.0"}


def test_an_alias_moves_elsewhere_only_where_it_was_moved_here(here):
    release = here.make(verdict=verdict("iterate"))
    with pytest.raises(NegativeResult, match="does not point"):
        here.ask("push", release, "--ssh", "host:/srv", "--alias", "champion")


@pytest.mark.parametrize(
    "words",
    [
        ("push", "{}"),
        ("push", "{}", "--to", "memory://x", "--hub", "a/b"),
        ("push", "{}", "--to", "memory://x", "--alias", "champion"),
        ("push", "{}", "--ssh", "nonsense"),
        ("pull",),
        ("pull", "{}", "--hub", "a/b"),
        ("pull", "{}", "--from", "memory://nothing-here"),
    ],
)
def test_a_mistake_is_reported_with_its_fix(here, words):
    release = here.make()
    with pytest.raises(UserError) as reported:
        here.ask(*(word.format(release) for word in words))
    assert reported.value.fix


def test_a_file_that_is_no_archive_is_refused(here, tmp_path):
    (tmp_path / "x.tar").write_bytes(b"nonsense" * 200)
    with pytest.raises(Corrupted, match="not an archive"):
        here.ask("import", str(tmp_path / "x.tar"))
    with pytest.raises(UserError, match="no such file"):
        here.ask("import", str(tmp_path / "missing.tar"))


def test_a_peft_folder_becomes_a_release_for_the_projects_base(tiny_base, tmp_path):
    place = Place(tmp_path / "place", base=str(tiny_base))
    adapter = write_adapter(tmp_path / "peft")
    reported = place.ask("import", str(adapter))
    assert reported["decision"] == "not_enough_evidence"
    assert place.known() == {reported["id"]: "1.0.0"}
    with use_project(open_project(place.root), NullReporter()) as work:
        release = open_store(work).verify(reported["id"])
        assert release.base_fingerprint == work.base.revision
    assert place.ask("import", str(adapter))["new"] is False
