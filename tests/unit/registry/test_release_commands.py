"""`graft release …` as it is typed: each verb on a project with releases, without a model."""

import json
from pathlib import Path

import pytest
import yaml
from registry_samples import PROJECT, dataset, parts, publish_parts, write_adapter

from graftwork.cli import main as cli
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.registry.project import open_store
from graftwork.serve.project import engine_job


class Place:
    """A project folder, releases made in it, and verbs typed in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys, self._made = root, capsys, 0
        self.configure()

    def configure(self, **sections) -> None:
        settings = {"project": PROJECT, "data": {"logs": ["logs.jsonl"]}, **sections}
        (self.root / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))

    def make(self, *, model: str = "main", **changes) -> str:
        self._made += 1
        adapter = write_adapter(self.root / "runs" / str(self._made), weights=b"%d" % self._made)
        data = dataset().model_copy(update={"model": model})
        with use_project(open_project(self.root), NullReporter()) as work:
            whole = {**parts(adapter), "dataset": data, **changes}
            return publish_parts(folder=open_store(work), index=work.releases, **whole).id

    def type(self, *words: str, code: int = 0, here: bool = True) -> str:
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["graft", "release", *words, *(("-C", str(self.root)) if here else ())])
            with pytest.raises(SystemExit) as left:
                cli.main()
        output = self._capsys.readouterr()
        assert left.value.code == code, output
        return output.out + output.err

    def ask(self, *words: str, code: int = 0):
        return json.loads(self.type(*words, "--json", code=code))


@pytest.fixture
def place(tmp_path, capsys) -> Place:
    return Place(tmp_path, capsys)


def test_releases_are_listed_shown_tagged_noted_and_found_again(place):
    first, second = place.make(), place.make(verdict=parts_verdict("iterate"))
    place.ask("promote", first, "--reason", "first")
    assert place.ask("edit", "champion", "--tag", "keep", "--tag", "audited")["tags"] == ["audited", "keep"]
    edited = place.ask("edit", "champion", "--untag", "audited", "--note", "speaks French")
    assert (edited["tags"], edited["notes"][0]["text"]) == (["keep"], "speaks French")
    listed = place.ask("list")
    assert [release["id"] for release in listed["releases"]] == [second, first]
    assert listed["aliases"] == {"champion": first}
    for question in (["--tag", "keep"], ["--decision", "deploy"], ["--search", "french"]):
        assert [release["id"] for release in place.ask("list", *question)["releases"]] == [first]
    assert place.ask("list", "--since", "1h")["releases"] == []
    assert place.ask("list", "--limit", "1")["more"] is True
    shown = place.ask("show", "1.0.0")
    assert (shown["id"], shown["version"], shown["tags"]) == (first, "1.0.0", ["keep"])
    assert shown["notes"][0]["text"] == "speaks French"
    assert place.ask("edit", first[:8], "--version", "4.0.0")["version"] == "4.0.0"
    words = place.type("list") + place.type("show") + place.type("log") + place.type("verify")
    for expected in (first[:12], "4.0.0", "champion", "speaks French", "first", "verified"):
        assert expected in words


def parts_verdict(decision):
    from registry_samples import verdict

    return verdict(decision)


@pytest.mark.parametrize(
    "words",
    [
        ("list", "--decision", "maybe"),
        ("list", "--since", "yesterday"),
        ("show", "../../etc/passwd"),
        ("promote", "0" * 64),
        ("promote", "champion", "--alias", "no-such-model/champion"),
        ("rollback", "--model", "no-such-model"),
        ("rollback",),
        ("edit", "champion", "--tag", "NOT A TAG"),
        ("edit", "champion", "--version", "v1"),
        ("edit", "champion", "--sign", "no-such-file"),
    ],
)
def test_a_mistake_is_reported_with_its_fix_and_changes_nothing(place, words):
    place.ask("promote", place.make())
    before = place.ask("log"), place.ask("list")
    reported = place.ask(*words, code=2)
    assert reported["what"]
    assert reported["fix"]
    assert (place.ask("log"), place.ask("list")) == before


def test_an_edit_that_cannot_sign_adds_no_note_so_that_it_can_be_repeated(place, tmp_path):
    place.ask("promote", place.make())
    taken = tmp_path / "keys"
    place.ask("edit", "champion", "--new-key", str(taken))
    place.ask("edit", "champion", "--note", "speaks French", "--new-key", str(taken), code=2)
    assert place.ask("show")["notes"] == []
    edited = place.ask("edit", "champion", "--note", "speaks French", "--sign", str(taken / "graft.key"))
    assert len(edited["notes"]) == 1


def test_promotion_needs_the_verdict_or_force_with_a_reason_and_the_log_keeps_both(place):
    release = place.make(verdict=parts_verdict("iterate"))
    assert place.ask("promote", release, code=1)["error"] == "NegativeResult"
    assert place.ask("promote", release, "--force", code=2)["what"].endswith("needs a reason")
    move = place.ask("promote", release, "--force", "--reason", "the old one is down")
    assert (move["forced"], move["why"]) == (True, "the old one is down")
    assert move["verdict_hash"] == parts_verdict("iterate").fingerprint()
    assert place.ask("log")["moves"] == [move]


def test_damaged_bytes_are_neither_promoted_nor_rolled_back_to(place):
    first, second = place.make(), place.make()
    place.ask("promote", first)
    place.ask("promote", second)
    path = place.root / ".graft" / "releases" / first / "plan.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")
    for words in (("rollback",), ("promote", first), ("verify", first)):
        reported = place.ask(*words, code=3)
        assert reported["error"] == "Corrupted"
        assert reported["why"]
        assert reported["fix"]
    assert place.ask("list")["aliases"] == {"champion": second}


def test_specialists_are_promoted_and_rolled_back_by_themselves(place):
    place.configure(models={"ufm": {}, "tagger": {}})
    main, one, two = place.make(model="ufm"), place.make(model="tagger"), place.make(model="tagger")
    place.ask("promote", main)
    assert place.ask("promote", one)["alias"] == "tagger/champion"
    assert place.ask("promote", two, "--alias", "tagger/champion")["previous"] == one
    assert place.ask("promote", two, "--alias", "challenger")["alias"] == "tagger/challenger"
    assert place.ask("promote", main, "--alias", "tagger/champion", code=2)["why"]
    assert place.ask("rollback", "--model", "tagger")["release_id"] == one
    assert place.ask("list")["aliases"] == {
        "champion": main,
        "tagger/champion": one,
        "tagger/challenger": two,
    }
    assert place.ask("show", "tagger/champion")["id"] == one
    assert [release["version"] for release in place.ask("list", "--model", "tagger")["releases"]] == [
        "1.0.1",
        "1.0.0",
    ]


def test_collection_follows_the_projects_rules_and_the_index_remembers(place):
    place.configure(release={"keep_last": 1, "keep_days": 0})
    releases = [place.make() for _ in range(5)]
    place.ask("promote", releases[0])
    place.ask("promote", releases[1])
    place.ask("edit", releases[2], "--tag", "keep")
    reported = place.ask("gc", "--dry-run")
    assert reported["releases"] == [releases[3]]
    assert place.ask("verify", releases[3])
    assert place.ask("gc")["releases"] == [releases[3]]
    assert "newest" in place.ask("gc")["why_kept"][releases[4]]
    assert releases[3] not in [release["id"] for release in place.ask("list")["releases"]]
    assert releases[3] in [release["id"] for release in place.ask("list", "--collected")["releases"]]
    assert "garbage collection" in place.ask("promote", releases[3], code=3)["why"]
    assert place.ask("rollback")["release_id"] == releases[0]
    # What was rolled back from is history no more.
    assert place.ask("gc", "--keep-last", "0")["releases"] == sorted([releases[1], releases[4]])


def test_a_lost_index_loses_no_release(place):
    place.configure(release={"keep_last": 0, "keep_days": 0})
    releases = [place.make() for _ in range(2)]
    for path in (place.root / ".graft").glob("state.db*"):
        path.unlink()
    place.configure(release={"keep_last": 9})
    assert sorted(place.ask("gc")["adopted"]) == sorted(releases)
    assert {release["id"] for release in place.ask("list")["releases"]} == set(releases)
    assert place.ask("promote", releases[0])


def test_releases_on_disk_come_back_into_a_lost_index(place):
    releases = [place.make() for _ in range(2)]
    for path in (place.root / ".graft").glob("state.db*"):
        path.unlink()
    assert "graft release list --index" in place.type("list")
    damaged = place.root / ".graft" / "releases" / releases[1] / "verdict.json"
    content = damaged.read_bytes()
    damaged.unlink()
    assert place.ask("list", "--index")["indexed"] == {"added": [releases[0]], "refused": [releases[1]]}
    damaged.write_bytes(content)
    assert place.ask("list", "--index")["indexed"] == {"added": [releases[1]], "refused": []}
    assert {release["id"] for release in place.ask("list")["releases"]} == set(releases)
    assert place.ask("promote", releases[0])


def test_a_project_that_trusts_a_key_promotes_only_what_is_signed(place, tmp_path):
    keys = place.ask("edit", place.make(), "--new-key", str(tmp_path / "keys"))
    release = place.make()
    place.configure(release={"public_key": keys["public_key"]})
    assert "not signed" in place.ask("promote", release, code=1)["what"]
    place.ask("edit", release, "--sign", keys["secret_key"])
    assert place.ask("promote", release)["release_id"] == release
    assert place.ask("verify")["signature_checked"] is True
    place.configure(release={"public_key": "nonsense"})
    assert place.ask("verify", code=2)["where"] == "release.public_key"


def test_a_key_is_created_before_the_first_release(place, tmp_path):
    keys = json.loads(place.type("edit", "--new-key", str(tmp_path / "keys"), "--json", here=False))
    assert Path(keys["secret_key"]).is_file()
    assert keys["public_key"].startswith("RW")
    assert f"public_key: {keys['public_key'][:2]}" in place.type("edit", "--new-key", str(tmp_path / "more"))
    place.configure(release={"public_key": keys["public_key"]})
    place.ask("edit", place.make(), "--sign", keys["secret_key"])
    place.type("edit", "--new-key", str(tmp_path / "third"), "--tag", "keep", code=2)
    place.type("edit", "--tag", "keep", code=2)
    assert not (tmp_path / "third").exists()


def test_a_lineage_goes_down_to_the_log_and_back_to_the_parents(place):
    first = place.make()
    second = place.make(parent=first)
    graph = place.ask("lineage", second)
    kinds = [node["kind"] for node in graph["nodes"]]
    assert kinds[0] == "release"
    assert {"release", "run", "plan", "report", "verdict", "base", "dataset", "file"} <= set(kinds)
    assert {"made": f"release:{second}", "of": f"release:{first}", "how": "replaced"} in graph["edges"]
    assert place.type("lineage", second, "--dot").startswith("digraph lineage {")
    words = place.type("lineage", second)
    assert (
        next(node for node in graph["nodes"] if node["kind"] == "file")["facts"]["state"] == "no longer there"
    )
    for expected in (second[:12], first[:12], "logs.jsonl", "run-1"):
        assert expected in words


def test_a_missing_base_stops_what_needs_it_and_nothing_else(place):
    place.configure(base="./gone/model")
    first, second = place.make(), place.make()
    for release in (first, second):
        place.ask("promote", release)
    assert place.ask("rollback")["release_id"] == first
    with (
        use_project(open_project(place.root), NullReporter()) as work,
        open_store(work).lease() as held,
        pytest.raises(UserError, match="no base model") as reported,
    ):
        engine_job(work, held, work.settings.serve)
    assert reported.value.why
    assert reported.value.fix
    assert reported.value.where.endswith("gone/model")
