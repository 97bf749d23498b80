"""The registry's pure rules: what stays, where a release comes from, whose licence it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.release import ReleaseEntry
from graftwork.registry.index import select_retained
from graftwork.registry.manifest import alias_of_model, sort_key, split_alias
from graftwork.registry.project import LineageEdge, LineageGraph, LineageNode, to_dot, to_ranges
from graftwork.registry.publish import find_licence


def entry(name: str, *, day: int = 1, **more) -> ReleaseEntry:
    fields = {"id": name, "model": "main", "version": None, "base": "b", "decision": "deploy", "run_id": "r"}
    made = {"dataset_hash": "d", "parent": None, "created_at": f"2026-01-{day:02d}T00:00:00+00:00"}
    return ReleaseEntry(**{**fields, **made, **more})


def kept(*entries: ReleaseEntry, **rules) -> dict[str, str]:
    given_rules = {"reachable": (), "leased": (), "keep_last": 0, "young_since": "2027"}
    return select_retained(entries, **{**given_rules, **rules})


def test_unneeded_releases_are_collected_and_every_kept_one_says_why():
    entries = (entry("new", day=9), entry("pinned", tags=("keep",)), entry("old"), entry("older"))
    assert kept(*entries, keep_last=1) == {
        "new": "it is one of the 1 newest of main",
        "pinned": "it is tagged keep",
    }
    assert set(kept(*entries, young_since="2026-01-05")) == {"new", "pinned"}
    assert set(kept(*entries, reachable={"old"}, leased={"older"})) == {"pinned", "old", "older"}


def test_each_model_keeps_newest_of_its_own():
    entries = (entry("m1"), entry("m2"), entry("t1", model="tagger"), entry("t2", model="tagger"))
    assert set(kept(*entries, keep_last=1)) == {"m1", "t1"}


def test_a_half_collected_release_is_kept_only_if_it_is_needed():
    half = entry("half", collected_at="2026-01-02")
    assert kept(half, keep_last=5, young_since="2000") == {}
    assert set(kept(half, leased={"half"})) == {"half"}


@given(st.sets(st.integers(1, 60)))
def test_ranges_say_each_number_once(numbers):
    found = set()
    for part in filter(None, to_ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_no_name_in_a_lineage_can_break_the_drawing():
    nodes = tuple(
        LineageNode(id=name, kind="file", name=name, facts={"state": 'a "quoted"\nline'})
        for name in ('a"]; evil [', "back\\slash")
    )
    text = to_dot(LineageGraph(nodes=nodes, edges=(LineageEdge(made=nodes[0].id, of=nodes[1].id, how="x"),)))
    for line in text.splitlines()[3:-1]:
        outside, inside = "", False
        for place, letter in enumerate(line):
            escaped = (len(line[:place]) - len(line[:place].rstrip("\\"))) % 2
            if letter == '"' and not escaped:
                inside = not inside
            elif not inside:
                outside += letter
        assert not inside
        assert "evil" not in outside


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({}, None),
        ({"README.md": "---\nlicense: apache-2.0\n---\n# hi"}, "apache-2.0"),
        ({"README.md": '---\nlicense: "other"\nlicense_name: llama3.2\n---\n'}, "llama3.2"),
        ({"README.md": "license: mit, says the text below no head"}, None),
        ({"config.json": json.dumps({"license": "gemma"})}, "gemma"),
        ({"config.json": "no json", "LICENSE": "\n  Apache License\n Version 2.0\n"}, "apache-2.0"),
        ({"LICENSE.txt": "Our own terms\nof use"}, "Our own terms"),
        ({"README.md": "---\nlicense: mit\n---", "LICENSE": "Apache License"}, "mit"),
    ],
)
def test_a_licence_is_what_the_files_state_and_never_a_guess(tmp_path, files, licence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_licence(tmp_path) == licence


def test_aliases_of_specialists_follow_their_model():
    assert alias_of_model("champion", model="ufm", main="ufm") == "champion"
    assert alias_of_model("champion", model="tagger", main="ufm") == "tagger/champion"
    assert alias_of_model("tagger/champion", model="tagger", main="ufm") == "tagger/champion"
    assert split_alias("tagger/champion") == ("tagger", "champion")
    assert split_alias("champion") == (None, "champion")


def test_versions_are_compared_as_numbers():
    assert max(["1.9.0", "1.10.0", "1.2.99"], key=sort_key) == "1.10.0"
