import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, WHEN

from graftwork.records.errors import Busy, NegativeResult, UserError
from graftwork.records.release import Release
from graftwork.records.report import Decision
from graftwork.registry import index as aliases
from graftwork.registry.index import Change, alias_history, find_release, plan_rollback
from graftwork.registry.manifest import NAME, require_name
from graftwork.registry.settings import ReleaseSettings


def promote(index, release, *, alias="champion", who="ada", when=WHEN, why="", **how):
    return aliases.promote(index, release, alias=alias, change=Change(who, when, why), **how)


def rollback(index, *, alias="champion", who="ada", when=WHEN, **how):
    return aliases.rollback(index, alias=alias, change=Change(who, when), **how)


def release(letter: str, decision: Decision = "deploy") -> Release:
    return Release(
        id=letter * 64,
        project=PROJECT,
        base="small",
        base_fingerprint="b",
        template_fingerprint="t",
        adapter_hash="a",
        dataset_hash="d",
        plan_hash="p",
        report_hash="r",
        verdict_hash="v",
        decision=decision,
        run_id="run",
        parent=None,
        created_at=WHEN,
        files=(),
        settings={},
        versions={},
    )


A, B, C, D = (release(letter) for letter in "abcd")


@pytest.fixture
def index() -> InMemoryReleaseIndex:
    made = InMemoryReleaseIndex(project=PROJECT)
    for release in (A, B, C, D):
        made.add(release)
    return made


def live(index: InMemoryReleaseIndex) -> str:
    return index.aliases()["champion"][0]


def test_a_cleared_release_goes_live_and_the_log_says_why(index):
    move = promote(index, A, why="first")
    assert move == index.alias_log("champion")[0]
    assert (move.release_id, move.previous, move.why, move.forced) == (A.id, None, "first", False)


def test_promoting_what_is_live_changes_and_logs_nothing(index):
    promote(index, A)
    assert promote(index, A) is None
    assert len(index.alias_log("champion")) == 1


@pytest.mark.parametrize("decision", ["iterate", "abort", "not_enough_evidence"])
def test_a_release_without_a_passing_verdict_is_promoted_only_by_force_with_a_reason(index, decision):
    doubtful = release("e", decision)
    index.add(doubtful)
    with pytest.raises(NegativeResult) as refused:
        promote(index, doubtful)
    assert decision.replace("_", " ") in refused.value.why
    with pytest.raises(UserError, match="reason"):
        promote(index, doubtful, force=True, why="  ")
    assert index.aliases() == {}
    move = promote(index, doubtful, force=True, why="the old one is down")
    assert move.forced
    assert index.alias_log("champion")[0].why == "the old one is down"


def test_force_that_was_not_needed_is_not_logged_as_force(index):
    assert not promote(index, A, force=True).forced


def test_a_project_may_promote_without_a_verdict(index):
    doubtful = release("e", "iterate")
    index.add(doubtful)
    assert promote(index, doubtful, require_verdict=False) is not None


def test_repeated_rollbacks_walk_back_instead_of_to_and_fro(index):
    for release in (A, B, C):
        promote(index, release)
    rollback(index)
    assert live(index) == "b"
    rollback(index)
    assert live(index) == "a"
    with pytest.raises(UserError, match="nothing to roll"):
        rollback(index)
    assert live(index) == "a"


def test_a_promotion_after_a_rollback_rolls_back_to_where_it_came_from(index):
    for release in (A, B):
        promote(index, release)
    rollback(index)
    promote(index, C)
    rollback(index)
    assert live(index) == "a"
    assert len(index.alias_log("champion")) == 5


@pytest.mark.parametrize("meanwhile", [[C], [C, B], [None], [None, B, C, B]])
def test_a_rollback_that_was_decided_on_another_history_is_refused(index, meanwhile):
    """Who saw B live and A before it must not roll back what somebody made live since."""
    for release in (D, A, B):
        promote(index, release)
    seen = plan_rollback(index, alias="champion")
    assert seen == (B.id, A.id)
    for release in meanwhile:
        rollback(index) if release is None else promote(index, release)
    before = index.alias_log("champion")
    with pytest.raises(Busy, match="another process"):
        rollback(index, planned=seen)
    assert index.alias_log("champion") == before
    assert alias_history(before)[-1] == index.aliases()["champion"]


def test_an_alias_that_never_was_cannot_be_rolled_back(index):
    with pytest.raises(UserError, match="nothing to roll"):
        rollback(index)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", "back"]), max_size=30))
def test_promotions_and_rollbacks_behave_like_a_stack(actions):
    index = InMemoryReleaseIndex(project=PROJECT)
    by_letter = {release.id[0]: release for release in (A, B, C, D)}
    for release in by_letter.values():
        index.add(release)
    stack: list[str] = []
    for action in actions:
        if action != "back":
            promote(index, by_letter[action])
            if not stack or stack[-1] != action:
                stack.append(action)
        elif len(stack) > 1:
            rollback(index)
            stack.pop()
        else:
            with pytest.raises(UserError):
                rollback(index)
        if stack:
            assert live(index) == stack[-1]


def test_a_release_is_found_by_alias_id_or_beginning(index):
    promote(index, B)
    assert find_release(index, "champion") == find_release(index, B.id) == find_release(index, "bb") == B
    with pytest.raises(UserError):
        find_release(index, "../../etc")


@given(st.text(max_size=70))
def test_only_harmless_names_pass(name):
    try:
        passed = require_name(name, kind="alias")
    except UserError:
        assert not NAME.fullmatch(name)
    else:
        assert passed == name
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
        assert 1 <= len(name) <= 64
        assert name[0] not in "._-"


def test_settings_refuse_an_alias_that_is_no_name():
    assert ReleaseSettings().alias == "champion"
    with pytest.raises(ValueError, match="alias"):
        ReleaseSettings(alias="../x")


def test_the_registry_does_not_import_the_database():
    code = (
        "import sys, graftwork.registry.publish, graftwork.registry.index, graftwork.registry.settings\n"
        "assert not {'sqlalchemy', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
