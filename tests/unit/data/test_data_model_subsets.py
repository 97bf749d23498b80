"""Each model gets its own rows and its share of the rest, and what is held out is held out for all."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from graftwork.data.settings import ModelSettings
from graftwork.data.split.model_subsets import (
    NOT_SELECTED,
    RL,
    TEST,
    TRAIN,
    VALIDATION,
    KeptRows,
    find_unmatched,
    select_subsets,
    summarize_subsets,
)
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import UserError
from graftwork.views.dataset import view_portions
from graftwork.views.terminal import print_document

ROLES = ["writer", "coder", "judge"]
DOMAINS = ["law", "art"]


def make_facts(count=3000, *, seed=1, groups=None):
    """Rows in groups; the split goes by group, as in a corpus."""
    chance = np.random.default_rng(seed)
    group = chance.integers(0, groups or max(count // 3, 1), count)
    return KeptRows(
        role=chance.integers(-1, len(ROLES), count).astype(np.int32),
        role_names=ROLES,
        domain=chance.integers(-1, len(DOMAINS), count).astype(np.int32),
        domain_names=DOMAINS,
        stage=chance.choice([-1, 1, 2, 3, 4], count).astype(np.int32),
        split=np.array([0, 0, 0, 1, 2], dtype=np.uint8)[group * 7919 % 5],
        group=group,
        key=chance.integers(0, 2**64, count, dtype=np.uint64),
    )


def cut(facts, rows):
    return facts._replace(
        **{name: getattr(facts, name)[rows] for name in ("role", "domain", "stage", "split", "group", "key")}
    )


def divide_one(facts, *, seed=0, **model):
    [subset] = select_subsets(facts, {"m": ModelSettings.model_validate(model)}, seed=seed)
    return subset


KEEPS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.lists(st.sampled_from(ROLES), max_size=2),
        "domain": st.lists(st.sampled_from(DOMAINS), max_size=1),
        "stage": st.lists(st.integers(1, 4), max_size=3),
    },
)
SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7])
MODELS = st.builds(
    lambda keep, replay, rl: ModelSettings.model_validate({"keep": keep, "replay": replay, "rl": rl}),
    KEEPS,
    SHARES,
    SHARES,
)


def test_the_numbers_of_the_splits_are_those_of_the_dataset():
    assert [SPLITS[n] for n in (TRAIN, VALIDATION, TEST)] == ["train", "validation", "test"]


def test_a_model_that_names_nothing_gets_every_row_in_its_split():
    facts = make_facts()
    subset = divide_one(facts)
    assert (subset.split == facts.split).all()
    assert subset.own.all()
    assert (subset.weight == 1).all()


@given(st.dictionaries(st.sampled_from("abc"), MODELS, min_size=1), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_rows_held_out_for_one_model_are_trained_on_by_none(models, seed, rows):
    facts = make_facts(400, seed=rows)
    for subset in select_subsets(facts, models, seed=seed):
        learned = (subset.split == TRAIN) | (subset.split == RL)
        assert (facts.split[learned] == TRAIN).all()
        for held_out in (VALIDATION, TEST):
            mine = subset.split == held_out
            assert (facts.split[mine] == held_out).all()
            assert subset.own[mine].all()
        groups = {split: set(facts.group[subset.split == split].tolist()) for split in range(4)}
        assert not groups[TRAIN] & (groups[VALIDATION] | groups[TEST] | groups[RL])
        assert not groups[RL] & (groups[VALIDATION] | groups[TEST])
        assert not subset.own[subset.split == NOT_SELECTED].any()


@given(MODELS, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_replayed_share_is_the_one_asked_for_or_all_there_is(model, seed):
    facts = make_facts(900, seed=seed)
    [subset] = select_subsets(facts, {"m": model}, seed=seed)
    trained = subset.split == TRAIN
    own, replayed = np.count_nonzero(trained & subset.own), np.count_nonzero(trained & ~subset.own)
    asked = round(own * model.replay / (1 - model.replay))
    apart = set(facts.group[subset.split == RL].tolist())
    others = sum(
        split == TRAIN and not mine and group not in apart
        for split, mine, group in zip(facts.split, subset.own, facts.group.tolist(), strict=True)
    )
    assert replayed == min(asked, others)


def test_own_rows_are_those_that_match_every_key_that_is_named():
    facts = make_facts()
    subset = divide_one(facts, keep={"role": ["coder", "judge"], "stage": [2]})
    wanted = np.isin(facts.role, [1, 2]) & (facts.stage == 2)
    assert (subset.own == wanted).all()
    assert ((subset.split != NOT_SELECTED) == wanted).all()


def test_rows_logged_later_take_the_place_of_few_replayed_ones():
    facts = make_facts(4000)
    model = {"keep": {"role": ["coder"]}, "replay": 0.3}
    before = divide_one(cut(facts, slice(0, 3960)), **model)
    after = divide_one(facts, **model)
    drawn = (before.split == TRAIN) & ~before.own
    still = (after.split[:3960] == TRAIN) & ~after.own[:3960]
    assert np.count_nonzero(drawn & ~still) <= 0.03 * np.count_nonzero(drawn)


@given(st.integers(1, 299), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_rows_logged_later_move_no_question_between_training_and_rl(old, seed):
    facts = make_facts(300, seed=seed)
    before = divide_one(cut(facts, slice(0, old)), rl=0.7)
    after = divide_one(facts, rl=0.7)
    assert (before.split == after.split[:old]).all()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_questions_fall_to_rl_by_the_share_and_whole(share):
    facts = make_facts(20_000)
    subset = divide_one(facts, rl=share)
    apart = set(facts.group[subset.split == RL].tolist())
    left = set(facts.group[subset.split == TRAIN].tolist())
    assert not apart & left
    assert len(apart) / len(apart | left) == pytest.approx(share, abs=0.03)


def test_a_larger_share_for_rl_keeps_the_questions_of_a_smaller_one():
    facts = make_facts()
    small, large = divide_one(facts, rl=0.3), divide_one(facts, rl=0.7)
    assert (large.split[small.split == RL] == RL).all()


def test_another_seed_draws_again_and_the_same_seed_does_not():
    facts = make_facts()
    model = {"keep": {"role": ["coder"]}, "replay": 0.2, "rl": 0.5}
    first, again, other = (divide_one(facts, seed=seed, **model) for seed in (0, 0, 1))
    assert (first.split == again.split).all()
    assert (first.split != other.split).any()


def test_weights_go_by_role_and_touch_nothing_that_is_held_out():
    facts = make_facts()
    subset = divide_one(
        facts, keep={"role": ["coder", "writer"]}, replay=0.3, weights={"coder": 2, "judge": 0.5}
    )
    trained = subset.split == TRAIN
    for place, weight in ((1, 2.0), (2, 0.5), (0, 1.0), (-1, 1.0)):
        rows = trained & (facts.role == place)
        assert rows.any()
        assert (subset.weight[rows] == weight).all()
    held_out = (subset.split == VALIDATION) | (subset.split == TEST)
    assert (subset.weight[held_out] == 1).all()
    assert (subset.weight[subset.split == NOT_SELECTED] == 0).all()


def test_groups_may_be_numbered_by_any_64_bits():
    facts = make_facts()
    strange = facts._replace(group=facts.group * -(2**40) - 2**62)
    subset = divide_one(strange, rl=0.5)
    assert (subset.split == RL).any()
    assert not set(strange.group[subset.split == RL].tolist()) & set(
        strange.group[subset.split == TRAIN].tolist()
    )


@pytest.mark.parametrize(
    ("keep", "key", "exist"),
    [
        ({"role": ["scribe"]}, "role", "coder, judge, writer"),
        ({"domain": ["music"]}, "domain", "art, law"),
        ({"stage": [9]}, "stage", "1, 2, 3, 4"),
        ({"stage": [-1]}, "stage", "1, 2, 3, 4"),
    ],
)
def test_a_filter_that_matches_nothing_names_model_key_and_what_there_is(keep, key, exist):
    with pytest.raises(UserError) as caught:
        select_subsets(make_facts(), {"special": ModelSettings.model_validate({"keep": keep})}, seed=0)
    assert caught.value.where == f"models.special.keep.{key}"
    assert exist in caught.value.why
    assert caught.value.fix


def test_keys_that_match_only_apart_from_each_other_are_refused():
    facts = make_facts()
    facts = facts._replace(stage=np.where(facts.role == 1, 1, 2).astype(np.int32))
    with pytest.raises(UserError, match=r"models\.m\.keep matches no row"):
        divide_one(facts, keep={"role": ["coder"], "stage": [2]})


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_visits_is_refused_by_its_key(weight):
    with pytest.raises(ValidationError) as caught:
        ModelSettings(weights={"coder": weight})
    assert caught.value.errors()[0]["loc"] == ("weights", "coder")


def test_one_misspelt_value_next_to_good_ones_is_pointed_out():
    model = ModelSettings.model_validate(
        {"keep": {"role": ["coder", "revewer"], "stage": [1, 7]}, "weights": {"codre": 2}}
    )
    assert find_unmatched(make_facts(), {"m": model}) == [
        ("models.m.keep.role", "revewer"),
        ("models.m.keep.stage", "7"),
        ("models.m.weights", "codre"),
    ]


def test_no_rows_at_all_are_divided_into_nothing():
    facts = make_facts(0)
    subset = divide_one(facts, replay=0.5, rl=0.5)
    assert len(subset.split) == 0
    assert summarize_subsets([subset], facts)[0].own == 0


def test_the_table_counts_every_row_once_and_reads_as_json():
    facts = make_facts()
    models = {
        "main": ModelSettings.model_validate({"rl": 0.7}),
        "coder": ModelSettings.model_validate(
            {"keep": {"role": ["coder"]}, "replay": 0.2, "weights": {"coder": 2}}
        ),
    }
    main, coder = summarize_subsets(select_subsets(facts, models, seed=0), facts)
    assert main.own + main.rl + main.validation + main.test == len(facts.split)
    assert main.replayed == 0
    assert sum(main.stages.values()) + main.without_stage == main.own
    assert set(main.stages) == {1, 2, 3, 4}
    assert coder.replayed == round(coder.own / 4)
    assert coder.rows_per_epoch == 2 * coder.own + coder.replayed

    unmatched = find_unmatched(facts, {"m": ModelSettings.model_validate({"weights": {"x": 1}})})
    shown = io.StringIO()
    viewed = view_portions([main, coder], unmatched=unmatched)
    print_document(Console(file=shown, width=140), viewed)
    assert f"{coder.own:,}" in shown.getvalue()
    assert "models.m.weights" in shown.getvalue()


def test_a_model_without_repaired_rows_gets_none_and_the_others_keep_theirs():
    facts = make_facts()
    taught = (facts.split == TRAIN) & (facts.key % np.uint64(3) == 0)
    facts = facts._replace(taught=taught)
    with_them = divide_one(facts, replay=0.2, keep={"role": ["coder"]})
    without = divide_one(facts, replay=0.2, keep={"role": ["coder"]}, repaired=False)
    assert (with_them.split[taught] == TRAIN).any()
    assert not (without.split[taught] == TRAIN).any()
    held_out = facts.split != TRAIN
    assert (with_them.split[held_out] == without.split[held_out]).all()
