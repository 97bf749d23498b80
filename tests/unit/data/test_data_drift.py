"""Live prompts that are unlike the training data, and how many are without any drift."""

import random

import pytest

from graftwork.data.drift import MOST_TRAINING, compare_prompts, expected_share, thin_out

VERBS = ("explain", "list", "compare", "sort", "repair", "paint", "weigh", "measure", "count", "fold")
PLANTS = ("fern", "moss", "ivy", "lotus", "maple", "willow", "cedar", "thyme", "sage", "basil", "orchid")
PLACES = ("pond", "gate", "wall", "court", "terrace", "orchard", "glasshouse", "meadow")


def prompts(count, seed):
    chance = random.Random(seed)
    return [
        f"Please {chance.choice(VERBS)} the {chance.choice(PLANTS)} by the {chance.choice(PLACES)} "
        f"and the {chance.choice(PLANTS)} by the {chance.choice(PLACES)}"
        for _ in range(count)
    ]


def share(live, *, training=200, held_out=60):
    found = compare_prompts(prompts(training, 1), prompts(held_out, 2), live)
    return sum(prompt.unlike for prompt in found) / len(found)


def test_prompts_of_the_same_origin_are_unlike_about_as_often_as_expected():
    rates = []
    for seed in range(12):
        found = compare_prompts(
            prompts(200, 1000 + seed), prompts(60, 2000 + seed), prompts(100, 3000 + seed)
        )
        rates.append(sum(prompt.unlike for prompt in found) / len(found))
    assert 0.02 < sum(rates) / len(rates) < 0.08


def test_prompts_about_something_else_are_unlike():
    live = [f"Why does pod web{n} restart with exit code {n} on kubernetes node {n}?" for n in range(40)]
    assert share(live) == 1.0


def test_the_nearest_training_prompt_is_named_and_an_equal_one_is_alike():
    training = prompts(50, 1)
    found = compare_prompts(training, prompts(40, 2), [training[17]])
    assert training[found[0].place] == training[17]
    assert found[0].similarity == pytest.approx(1, abs=1e-4)
    assert not found[0].unlike


def test_few_held_out_prompts_raise_the_share_that_is_expected():
    assert expected_share(4) == 0.2
    assert expected_share(1000) == 0.05


def test_empty_prompts_are_compared_without_an_error():
    assert len(compare_prompts(["", "a b"], [""] * 5, ["", "c"])) == 2


def test_large_samples_are_thinned_out_evenly():
    places = thin_out(3 * MOST_TRAINING, MOST_TRAINING)
    assert len(places) == MOST_TRAINING
    assert list(places[:3]) == [0, 3, 6]
