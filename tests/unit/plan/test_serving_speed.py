"""Latency: never under the roofline, longer with more load, and in the range where others measured it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_samples import (
    DEEPSEEK,
    EPYC_9454P,
    EPYC_9554,
    L4,
    LLAMA_2_7B,
    LLAMA_8B,
    MISTRAL,
    PHI_4,
    QWEN,
    RTX_3080,
    RTX_4090,
    RTX_5060_TI,
    SMOLLM2,
    THREADRIPPER_5995WX,
    TWO_CORES,
    ask,
)

from graftwork.model.shape import layer_parameters
from graftwork.plan.serving import time_answers
from graftwork.plan.serving_question import weigh
from graftwork.records.hardware import Gpu

MEASURED = [
    (QWEN, RTX_5060_TI, "8 bits", "llama.cpp", 49.6),
    (LLAMA_8B, L4, "16 bits", "vllm", 16.7),
    (LLAMA_2_7B, RTX_4090, "4 bits", "vllm", 191.0),
    (LLAMA_8B, RTX_3080, "4 bits", "llama.cpp", 112.0),
    (PHI_4, EPYC_9554, "4 bits", "llama.cpp", 28.7),
    (PHI_4, EPYC_9554, "8 bits", "llama.cpp", 19.2),
    (MISTRAL, THREADRIPPER_5995WX, "4 bits", "llama.cpp", 33.7),
    (SMOLLM2, TWO_CORES, "4 bits", "llama.cpp", 89.0),
    (SMOLLM2, TWO_CORES, "4 bits", "llama.cpp", 103.0),
    (SMOLLM2, TWO_CORES, "32 bits", "embedded", 14.0),
]
"""Tokens a second of one user, by people and engines that `serving_question.py` names."""

FORMS = ("16 bits", "8 bits", "4 bits")
place = st.sampled_from([(DEEPSEEK, RTX_4090, 1), (QWEN, RTX_5060_TI, 2), (LLAMA_8B, EPYC_9454P, 1)])
load = st.fixed_dictionaries(
    {
        "users": st.integers(1, 64),
        "context": st.integers(600, 16_000),
        "adapters": st.integers(0, 20),
        "copies": st.integers(1, 8),
    }
)


@pytest.mark.parametrize(("shape", "on", "form", "engine", "measured"), MEASURED)
def test_measured_speeds_are_in_the_stated_range(shape, on, form, engine, measured):
    token = time_answers(ask(shape, on, engine=engine, context=192, answer=128), form).token_seconds
    assert token.holds(1 / measured)
    assert 1 / token.value == pytest.approx(measured, rel=0.3)


@settings(deadline=None)
@given(place=place, load=load, form=st.sampled_from(FORMS))
def test_nothing_is_faster_than_the_roofline(place, load, form):
    shape, on, gpus = place
    question = ask(shape, on, gpus=gpus, **load)
    latency = time_answers(question, form)
    if isinstance(on, Gpu):
        flops = (on.eight_tflops if form == "8 bits" else on.half_tflops) * 1e12 * gpus
    else:
        flops = on.gflops * 1e9
    read = weigh(shape, form=form, engine=question.engine)[1]
    products = 2.0 * layer_parameters(shape) * shape.layers
    assert latency.token_seconds.low >= read / (on.bandwidth_gb_s * 1e9 * gpus)
    assert latency.first_token_alone_seconds.low >= products * question.prompt / flops
    # Everything that all users were given was multiplied somewhere.
    assert latency.tokens_per_second.high * products <= flops


@settings(deadline=None)
@given(place=place, load=load, form=st.sampled_from(FORMS), more=st.sampled_from(["users", "context"]))
def test_more_load_never_answers_sooner(place, load, form, more):
    shape, on, gpus = place
    less = time_answers(ask(shape, on, gpus=gpus, **load), form)
    grown = time_answers(ask(shape, on, gpus=gpus, **{**load, more: 2 * load[more]}), form)
    for figure in ("first_token_seconds", "token_seconds", "answer_seconds"):
        before, after = getattr(less, figure), getattr(grown, figure)
        assert before.value <= after.value
        assert before.low <= after.low
        assert before.high <= after.high


@settings(deadline=None)
@given(users=st.integers(1, 64), form=st.sampled_from(FORMS))
def test_more_users_get_more_tokens_together(users, form):
    few = time_answers(ask(DEEPSEEK, RTX_4090, users=users), form).tokens_per_second.value
    many = time_answers(ask(DEEPSEEK, RTX_4090, users=users + 1), form).tokens_per_second.value
    assert many >= few


@pytest.mark.parametrize(("shape", "on"), [(DEEPSEEK, RTX_4090), (QWEN, EPYC_9454P), (SMOLLM2, TWO_CORES)])
def test_fewer_bits_make_a_single_users_tokens_come_sooner(shape, on):
    tokens = [time_answers(ask(shape, on), form).token_seconds.value for form in FORMS]
    assert tokens == sorted(tokens, reverse=True)


@settings(deadline=None)
@given(place=place, load=load, form=st.sampled_from(FORMS))
def test_the_parts_of_an_answer_make_the_answer(place, load, form):
    shape, on, gpus = place
    latency = time_answers(ask(shape, on, gpus=gpus, **load), form)
    whole = sum(part.value for part in latency.parts_seconds.values())
    assert whole == pytest.approx(latency.answer_seconds.value)


def test_six_adapters_share_a_reading_of_the_weights_and_six_models_do_not():
    adapters = time_answers(ask(DEEPSEEK, RTX_4090, users=6, adapters=6), "4 bits")
    models = time_answers(ask(DEEPSEEK, RTX_4090, users=6, copies=6), "4 bits")
    alone = time_answers(ask(DEEPSEEK, RTX_4090, users=6), "4 bits")
    assert models.parts_seconds["weights"].value > 4 * adapters.parts_seconds["weights"].value
    assert adapters.parts_seconds["weights"].value < 1.5 * alone.parts_seconds["weights"].value


def test_llama_cpp_reads_the_weights_for_every_adapter():
    one = time_answers(ask(DEEPSEEK, EPYC_9454P, users=6, adapters=1), "16 bits")
    six = time_answers(ask(DEEPSEEK, EPYC_9454P, users=6, adapters=6), "16 bits")
    assert six.parts_seconds["weights"].value > 3 * one.parts_seconds["weights"].value


def test_a_prompt_that_is_held_from_before_is_not_read_again():
    whole = time_answers(ask(QWEN, EPYC_9454P, context=4096), "4 bits").first_token_seconds.value
    rest = time_answers(ask(QWEN, EPYC_9454P, context=4096, prompt=200), "4 bits").first_token_seconds.value
    assert rest < whole / 10
