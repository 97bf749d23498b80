"""What every index keeps about releases next to their manifests: versions, tags, notes, what is collected."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_memory_index import InMemoryReleaseIndex
from new_database import new_database
from store_samples import PROJECT, WHEN, release

from graftwork.records.errors import UserError
from graftwork.records.release import ReleaseQuery
from graftwork.registry import index as aliases
from graftwork.registry.index import Change, ReleaseIndex, find_release
from graftwork.store.database import open_database
from graftwork.store.releases import ReleaseTable

A, B, C = release("a"), release("b"), release("c")
BY = {"who": "ada", "when": WHEN}


def promote(index, release, *, alias="champion", who="ada", when=WHEN, why="", **how):
    return aliases.promote(index, release, alias=alias, change=Change(who, when, why), **how)


def rollback(index, *, alias="champion", who="ada", when=WHEN, **how):
    return aliases.rollback(index, alias=alias, change=Change(who, when), **how)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReleaseIndex]:
    if request.param == "memory":
        yield InMemoryReleaseIndex(project=PROJECT)
        return
    database = open_database(new_database(request.param, request=request, folder=tmp_path))
    yield ReleaseTable(database, project=PROJECT)
    database.close()


def found(index: ReleaseIndex, **query) -> list[str]:
    return [entry.id for entry in index.entries(ReleaseQuery(**query))]


def test_each_model_has_versions_of_its_own_that_follow_from_what_changed(index):
    other_data = B.model_copy(update={"dataset_hash": "e" * 64})
    other_base = C.model_copy(update={"dataset_hash": "e" * 64, "base_fingerprint": "f" * 64})
    specialist = release("s").model_copy(update={"model": "tagger"})
    for entry in (A, release("a2"), other_data, other_base, specialist):
        index.add(entry)
    assert [(entry.model, entry.version) for entry in reversed(index.entries())] == [
        ("main", "1.0.0"),
        ("main", "1.0.1"),
        ("main", "1.1.0"),
        ("main", "2.0.0"),
        ("tagger", "1.0.0"),
    ]


def test_a_version_can_be_given_once_and_is_continued_from(index):
    index.add(A, version="3.4.5")
    with pytest.raises(UserError, match=r"3\.4\.5 is already release"):
        index.add(B, version="3.4.5")
    index.add(B)
    assert index.entry(B.id).version == "3.4.6"
    with pytest.raises(UserError, match="already"):
        index.set_version(B.id, "3.4.5")
    index.set_version(B.id, "3.10.0")
    index.add(C)
    assert index.entry(C.id).version == "3.10.1"
    with pytest.raises(UserError, match="not a version"):
        index.set_version(A.id, "v1")


def test_a_release_is_found_by_its_version(index):
    index.add(A)
    index.add(release("s").model_copy(update={"model": "tagger"}))
    assert find_release(index, "main@1.0.0") == A
    assert find_release(index, "tagger@1.0.0").model == "tagger"
    for unclear in ("1.0.0", "9.9.9", "none@1.0.0"):
        with pytest.raises(UserError, match="version"):
            find_release(index, unclear)


def test_tags_are_added_and_taken_off(index):
    index.add(A)
    assert index.tag(A.id, ["keep", "audited"]) == ("audited", "keep")
    assert index.tag(A.id, ["keep"]) == ("audited", "keep")
    assert index.tag(A.id, ["audited", "never-there"], remove=True) == ("keep",)
    assert index.entry(A.id).tags == ("keep",)
    for bad in ("", "a b", "../x", "A"):
        with pytest.raises(UserError):
            index.tag(A.id, [bad])
    with pytest.raises(UserError, match="no release"):
        index.tag(B.id, ["keep"])


def test_notes_stay_in_their_order(index):
    index.add(A)
    for text in ("first", "second: ünïcode 100 %", "nul \0 gone"):
        index.note(A.id, text, **BY)
    assert [note.text for note in index.notes(A.id)] == ["first", "second: ünïcode 100 %", "nul  gone"]
    assert index.notes(A.id)[0].who == "ada"
    with pytest.raises(UserError, match="no release"):
        index.note(B.id, "x", **BY)


def test_releases_are_listed_by_what_is_asked_for(index):
    doubtful = release("doubt", decision="iterate").model_copy(
        update={"base": "other", "created_at": "2026-01-01T00:00:00+00:00", "model": "tagger"}
    )
    for entry in (A, B, doubtful):
        index.add(entry)
    index.tag(B.id, ["audited"])
    index.note(A.id, "Speaks 50%_French", **BY)
    assert found(index) == [doubtful.id, B.id, A.id]
    assert found(index, limit=2) == [doubtful.id, B.id]
    assert found(index, tag="audited") == [B.id]
    assert found(index, decision="iterate") == found(index, base="other") == [doubtful.id]
    assert found(index, model="tagger") == found(index, since="2025-06-01") == [doubtful.id]
    assert found(index, search="50%_french") == [A.id]
    assert found(index, search="AUDIT") == [B.id]
    assert found(index, search=A.id[3:20]) == [A.id]
    assert found(index, search="%") == [A.id]
    assert found(index, model="main", decision="deploy", tag="none") == []


def test_an_aliased_release_is_not_collected_and_a_collected_one_gets_no_alias(index):
    for entry in (A, B, C, release("d")):
        index.add(entry)
    for entry in (A, B):
        promote(index, entry, alias="champion")
    assert index.collect([A.id, B.id, C.id], when=WHEN) == (C.id,)
    assert index.entry(C.id).collected_at == WHEN
    assert found(index, collected=False) == [release("d").id, B.id, A.id]
    with pytest.raises(UserError, match="removed by garbage collection"):
        promote(index, C, alias="champion")
    assert index.aliases() == {"champion": B.id}
    # Made again, it is there again.
    index.add(C)
    assert index.entry(C.id).collected_at is None
    promote(index, C, alias="champion")
    rollback(index, alias="champion")
    assert index.collect([A.id, B.id, C.id], when=WHEN) == (C.id,)


def test_each_model_has_aliases_of_its_own_and_their_moves_name_the_verdict(index):
    specialist = release("s").model_copy(update={"model": "tagger"})
    for entry in (A, specialist):
        index.add(entry)
    promote(index, A, alias="champion")
    promote(index, specialist, alias="tagger/champion")
    assert index.aliases() == {"champion": A.id, "tagger/champion": specialist.id}
    assert index.alias_log("tagger/champion")[0].verdict_hash == specialist.verdict_hash
    assert set(index.alias_logs()) == {"champion", "tagger/champion"}
    with pytest.raises(UserError, match="of the model main"):
        promote(index, A, alias="tagger/champion")
    assert find_release(index, "tagger/champion") == specialist
