"""What serving holds grows with the load, and the bounds are where it stops to fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_samples import DEEPSEEK, EPYC_9454P, LLAMA_8B, QWEN, RTX_4090, RTX_5060_TI, ask

from graftwork.plan.serving import hold, list_specialists, longest_context, most_users

CARD_FORMS = ("16 bits", "8 bits", "4 bits")
load = st.fixed_dictionaries(
    {
        "users": st.integers(1, 64),
        "context": st.integers(600, 16_000),
        "adapters": st.integers(0, 20),
        "copies": st.integers(1, 8),
    }
)
whichever = st.sampled_from([(DEEPSEEK, RTX_4090, 1), (QWEN, RTX_5060_TI, 2), (LLAMA_8B, EPYC_9454P, 1)])


def memory(question, form="4 bits"):
    return hold(question, form).memory_gib


@settings(deadline=None)
@given(place=whichever, load=load, more=st.sampled_from(["users", "context", "adapters", "copies"]))
def test_more_of_anything_never_takes_less_memory(place, load, more):
    shape, on, gpus = place
    if more == "copies" and load["copies"] == 1:
        # One model is split over all cards, two are next to each other.
        load["copies"] = 2
    less = memory(ask(shape, on, gpus=gpus, **load))
    grown = memory(ask(shape, on, gpus=gpus, **{**load, more: load[more] * 2 + 1}))
    assert less.value <= grown.value
    assert less.high <= grown.high


@settings(deadline=None)
@given(place=whichever, load=load)
def test_wider_weights_take_more_memory(place, load):
    shape, on, gpus = place
    question = ask(shape, on, gpus=gpus, **load)
    taken = [memory(question, form).value for form in CARD_FORMS]
    assert taken == sorted(taken, reverse=True)


@settings(deadline=None)
@given(place=whichever, load=load)
def test_the_parts_make_the_whole(place, load):
    shape, on, gpus = place
    held = hold(ask(shape, on, gpus=gpus, **load), "8 bits")
    assert sum(part.value for part in held.parts_gib.values()) == pytest.approx(held.memory_gib.value)
    assert held.spare_gib.value == pytest.approx(held.available_gib.value - held.memory_gib.value)


def test_the_cache_is_two_bytes_for_every_key_and_value():
    # 2 × 32 layers × 32 heads × 128 numbers × 2 bytes: half a mebibyte a token.
    held = hold(ask(DEEPSEEK, RTX_4090, users=4, context=2048), "4 bits")
    assert held.parts_gib["cache"].value == pytest.approx(4 * 2048 * 2**19 / 2**30)


@settings(deadline=None)
@given(context=st.integers(600, 8000), form=st.sampled_from(CARD_FORMS))
def test_the_most_users_that_fit_fit_and_one_more_does_not(context, form):
    most = most_users(ask(DEEPSEEK, RTX_4090, context=context), form)
    for users, fits in ((most.value, True), (most.value + 1, False)):
        if users:
            held = hold(ask(DEEPSEEK, RTX_4090, context=context, users=int(users)), form)
            assert (held.memory_gib.value <= held.available_gib.value) is fits


def test_the_longest_context_stops_at_what_the_model_was_made_for():
    assert longest_context(ask(QWEN, RTX_4090), "4 bits").value == QWEN.max_positions
    assert longest_context(ask(DEEPSEEK, RTX_5060_TI), "8 bits").value < DEEPSEEK.max_positions


def test_a_limit_on_memory_counts_like_a_smaller_machine():
    free = hold(ask(QWEN, EPYC_9454P), "16 bits")
    bound = hold(ask(QWEN, EPYC_9454P, memory_limit_gib=10), "16 bits")
    assert free.fits == "yes"
    assert bound.fits == "no"
    assert bound.available_gib.value == 10


def test_two_cards_halve_the_weights_of_one_base_and_keep_whole_models_whole():
    one = hold(ask(DEEPSEEK, RTX_5060_TI), "16 bits").parts_gib["weights"].value
    assert hold(ask(DEEPSEEK, RTX_5060_TI, gpus=2), "16 bits").parts_gib["weights"].value == pytest.approx(
        one / 2
    )
    six = hold(ask(DEEPSEEK, RTX_5060_TI, gpus=2, copies=6), "16 bits")
    assert six.parts_gib["weights"].value == pytest.approx(3 * one)


def test_six_models_in_sixteen_bits_take_75_gib_and_not_30_gb():
    wide, _, narrow = list_specialists(ask(DEEPSEEK, RTX_5060_TI, gpus=2, copies=6, users=6))
    assert wide.one_model_gib.value == pytest.approx(12.56, abs=0.01)
    assert 6 * wide.one_model_gib.value == pytest.approx(75.3, abs=0.1)
    assert wide.asked_whole_gib.value > 75
    assert wide.whole_models.value < 6
    # Six adapters of rank 16 are less than half a GiB next to one base.
    assert 6 * wide.one_adapter_gib.value < 0.5
    assert wide.asked_adapters_gib.value < 30 < wide.asked_whole_gib.value
    assert wide.adapters.low > 6
    assert narrow.one_model_gib.value * 2**30 / 1e9 == pytest.approx(3.9, abs=0.05)


def test_five_gigabytes_is_what_a_6_7b_model_takes_in_four_bits():
    held = hold(ask(DEEPSEEK, RTX_5060_TI, engine="llama.cpp", context=2048), "4 bits")
    assert held.memory_gib.low * 2**30 / 1e9 < 6
    assert held.memory_gib.high * 2**30 / 1e9 > 5
    assert hold(ask(DEEPSEEK, RTX_5060_TI, engine="llama.cpp"), "16 bits").memory_gib.low > 13
