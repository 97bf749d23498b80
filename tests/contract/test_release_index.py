"""What every index of releases promises: the two databases and the stand-in in memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from in_memory_index import InMemoryReleaseIndex
from new_database import new_database
from registry_samples import alias_move
from store_samples import PROJECT, release

from graftwork.records.errors import Busy, UserError
from graftwork.records.release import Release
from graftwork.registry.index import ReleaseIndex
from graftwork.store.database import open_database
from graftwork.store.releases import ReleaseTable

on_every_index = pytest.mark.parametrize("index", ["memory", "sqlite", "postgresql"], indirect=True)
A, B, C = release("a"), release("b"), release("c")


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReleaseIndex]:
    if request.param == "memory":
        yield InMemoryReleaseIndex(project=PROJECT)
        return
    database = open_database(new_database(request.param, request=request, folder=tmp_path))
    yield ReleaseTable(database, project=PROJECT)
    database.close()


def move(index: ReleaseIndex, to: Release, *, since: Release | None, alias: str = "champion", **how: bool):
    previous = since.id if since else None
    return index.move_alias(alias_move(alias, to.id, previous=previous, why="it is better", **how))


@on_every_index
def test_a_release_comes_back_as_it_went_in_by_any_unique_beginning(index: ReleaseIndex):
    index.add(A)
    assert index.get(A.id) == index.get(A.id[:1]) == index.get(A.id[:12]) == A


def test_a_release_is_entered_once_and_keeps_its_first_time(index: ReleaseIndex):
    index.add(A)
    index.add(A.model_copy(update={"created_at": "2030-01-01T00:00:00Z"}))
    assert index.list() == (A,)


def test_releases_are_listed_newest_first(index: ReleaseIndex):
    for entry in (B, A, C):
        index.add(entry)
    assert index.list() == (C, A, B)


@on_every_index
def test_a_beginning_that_means_none_or_several_is_refused(index: ReleaseIndex):
    twins = [A.model_copy(update={"id": "abcd" + digit * 60}) for digit in "12"]
    for twin in twins:
        index.add(twin)
    with pytest.raises(UserError, match="several"):
        index.get("abcd")
    with pytest.raises(UserError, match="no release"):
        index.get("ffff")
    assert index.get("abcd1") == twins[0]


BAD_NAMES = ["", "../x", "a/../b", "a/b/c", "/a", "a/", "%", "_", "A", ".x", "a" * 65, "a\n", "a\0"]


def test_a_name_that_could_escape_is_refused_everywhere(index: ReleaseIndex):
    index.add(A)
    for name in BAD_NAMES:
        with pytest.raises(UserError):
            index.get(name)
        with pytest.raises(UserError):
            index.alias_log(name)
        with pytest.raises(UserError):
            move(index, A, since=None, alias=name)
        with pytest.raises(UserError):
            index.add(A.model_copy(update={"id": name}))


def test_a_release_of_another_project_is_refused(index: ReleaseIndex):
    with pytest.raises(UserError, match="belongs to project"):
        index.add(release("x", project="other"))


@on_every_index
def test_an_alias_moves_and_leaves_a_log(index: ReleaseIndex):
    for entry in (A, B):
        index.add(entry)
    first = move(index, A, since=None)
    second = move(index, B, since=A, forced=True)
    third = move(index, A, since=B, rollback=True)
    move(index, B, since=None, alias="canary")
    assert index.aliases() == {"canary": B.id, "champion": A.id}
    assert index.alias_log("champion") == (first, second, third)
    assert [(m.previous, m.forced, m.rollback) for m in (first, second, third)] == [
        (None, False, False),
        (A.id, True, False),
        (B.id, False, True),
    ]


def test_a_rollback_goes_to_what_the_log_has_before_or_nowhere(index: ReleaseIndex):
    """The alias may point where it did with another history: then the log would show a wrong way back."""
    for entry in (A, B, C):
        index.add(entry)
    for to, since in ((A, None), (B, A), (C, B), (B, C)):
        move(index, to, since=since)
    with pytest.raises(Busy):
        move(index, A, since=B, rollback=True)
    assert index.aliases() == {"champion": B.id}
    assert len(index.alias_log("champion")) == 4
    move(index, C, since=B, rollback=True)


def test_an_alias_without_moves_has_an_empty_log(index: ReleaseIndex):
    assert index.alias_log("champion") == ()
    assert index.aliases() == {}


def test_an_alias_cannot_point_at_a_release_that_is_not_there(index: ReleaseIndex):
    with pytest.raises(UserError, match="no release"):
        move(index, A, since=None)
    assert index.aliases() == {}


@on_every_index
@pytest.mark.parametrize("believed", [None, B])
def test_moving_an_alias_fails_if_it_points_elsewhere(index: ReleaseIndex, believed: Release | None):
    for entry in (A, B, C):
        index.add(entry)
    move(index, A, since=None)
    with pytest.raises(Busy, match="moved by another process") as refused:
        move(index, C, since=believed)
    assert refused.value.fix
    assert index.aliases() == {"champion": A.id}
    assert len(index.alias_log("champion")) == 1


def test_moving_an_alias_fails_if_the_expected_one_does_not_exist(index: ReleaseIndex):
    for entry in (A, B):
        index.add(entry)
    with pytest.raises(Busy):
        move(index, B, since=A)
    assert index.aliases() == {}


@on_every_index
@pytest.mark.parametrize("already", [None, A])
def test_of_many_threads_that_move_at_once_exactly_one_wins(index: ReleaseIndex, already: Release | None):
    rivals = [release(f"rival {n}") for n in range(8)]
    for entry in (A, *rivals):
        index.add(entry)
    if already:
        move(index, already, since=None)
    gate = Barrier(len(rivals))

    def race(rival: Release) -> bool:
        gate.wait(timeout=300)
        try:
            move(index, rival, since=already)
        except Busy:
            return False
        return True

    with ThreadPoolExecutor(len(rivals)) as pool:
        won = list(pool.map(race, rivals))
    assert won.count(True) == 1
    assert index.aliases() == {"champion": rivals[won.index(True)].id}
    assert len(index.alias_log("champion")) == (2 if already else 1)
