"""Of all settings and levels the fastest that fits is found, with few replays, and none that fits less."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel import gpu_tuning
from graftwork.costmodel.gpu_memory import count, count_by_levels, gpu_peak, reserved_within
from graftwork.costmodel.gpu_step import step_recipe
from graftwork.costmodel.gpu_time import TrainedPart, gpu_seconds_per_token
from graftwork.costmodel.gpu_tuning import TuningOption, TuningRequest, _settings, choose_tuning, fastest
from graftwork.plan.catalog.hardware import default_rates
from graftwork.records.base import GIB
from graftwork.records.plan import ModelShape

BLOCKS = 6
SMALL = ModelShape(
    name="small",
    hidden_size=2048,
    layers=BLOCKS,
    heads=16,
    kv_heads=4,
    head_dim=128,
    intermediate_size=8192,
    vocab_size=32_000,
    tied_embeddings=False,
    max_positions=4096,
)
TRAINABLE = 4_000_000
ADAPTED = {6: TrainedPart(6, TRAINABLE, default_rates()), 3: TrainedPart(3, TRAINABLE, default_rates())}
FORMS = st.sampled_from(["whole", "eight", "four"])
LEVELS = st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)).filter(lambda two: sum(two) <= BLOCKS)


@cache
def ways(form, limit=2.0):
    return tuple(
        _settings(
            form,
            "whole",
            TuningRequest("lora", 6, 1, 4096, 1024, eight=False),
            limit_gib=limit,
            compiled=True,
        )
    )


@given(FORMS, st.data(), LEVELS)
@settings(max_examples=50, deadline=None)
def test_seconds_are_those_that_the_clock_model_states(form, data, levels):
    tuning = data.draw(st.sampled_from(ways(form)))
    keep, lean = levels
    stated = gpu_seconds_per_token(
        SMALL,
        tuning.model_copy(update={"keep": keep, "lean": lean}),
        TrainedPart(adapted=BLOCKS, trainable=TRAINABLE, rates=default_rates()),
    )
    assert TuningOption(SMALL, tuning, ADAPTED[6]).seconds(keep, lean) == pytest.approx(stated, rel=1e-9)


@given(FORMS, st.data(), LEVELS, st.sampled_from([6, 5, 3]))
@settings(max_examples=50, deadline=None)
def test_the_quick_count_is_the_long_one(form, data, levels, adapted):
    tuning = data.draw(st.sampled_from(ways(form)))
    keep, lean = min(levels[0], adapted), min(levels[1], adapted - min(levels[0], adapted))
    quick = count_by_levels(SMALL, tuning, trainable=TRAINABLE, adapted=adapted)(keep, lean)
    there = tuning.model_copy(update={"keep": keep, "lean": lean})
    walk = step_recipe(SMALL, there, trainable=TRAINABLE, adapted=adapted)
    assert quick.asked == count(walk).bytes


@given(FORMS, st.data())
@settings(max_examples=20, deadline=None)
def test_keeping_more_activations_takes_no_less_memory_and_no_more_time(form, data):
    way = TuningOption(SMALL, data.draw(st.sampled_from(ways(form))), ADAPTED[6])
    for keep in range(BLOCKS):
        for lean in range(BLOCKS - keep):
            here = way.count(keep, lean).asked
            assert way.count(keep, lean + 1).asked >= here
            assert way.count(keep + 1, lean).asked >= here
            assert way.seconds(keep, lean) >= way.seconds(keep, lean + 1) >= way.seconds(keep + 1, lean)


@pytest.mark.parametrize("limit", [1.0, 1.1, 1.2, 1.5])
@pytest.mark.parametrize("adapted", [6, 3])
def test_hardly_anything_faster_would_have_fitted(limit, adapted):
    """Against all that there is, one by one; a grain of memory may be left."""
    trained = ADAPTED[adapted]
    some = ways("eight", limit)[::5]
    found = fastest(SMALL, some, trained)
    assert found is not None
    faster = [
        one
        for setting in some
        for way in [TuningOption(SMALL, setting, trained)]
        for keep in range(adapted + 1)
        for lean in range(adapted - keep + 1)
        if way.seconds(keep, lean) < 0.99 * found.seconds_per_token and way.seems_to_fit(keep, lean)
        if (one := way.replayed(keep, lean)) is not None
    ]
    assert faster == []


@pytest.mark.parametrize("limit", [1.0, 1.1, 1.5])
def test_the_fastest_setting_found_fits_the_card(limit):
    found = fastest(SMALL, ways("eight", limit), ADAPTED[6])
    assert found is not None
    peak = gpu_peak(SMALL, found, trainable=TRAINABLE, adapted=BLOCKS)
    assert found.peak_gib == peak.reserved / GIB <= limit


def test_where_there_is_no_room_for_anything_nothing_is_found():
    assert fastest(SMALL, ways("eight", 0.1), ADAPTED[6]) is None
    assert fastest(SMALL, (), ADAPTED[6]) is None


@given(
    st.floats(0.3, 3), st.floats(1.0, 1.2), st.sampled_from(["lora", "qlora"]), st.booleans(), st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_more_memory_never_makes_any_method_slower(limit, more, method, eight, half):
    def choose(limit_gib):
        return choose_tuning(
            SMALL,
            TuningRequest(
                method=method,
                adapted=3 if half else 6,
                trainable=TRAINABLE,
                step_tokens=4096,
                longest=512,
                eight=eight,
            ),
            limit_gib=limit_gib,
            rates=default_rates(),
        )

    small, large = choose(limit), choose(limit * more)
    if small is not None:
        assert large is not None
        assert large.seconds_per_token <= small.seconds_per_token * (1 + 1e-9)


@pytest.mark.parametrize("limit", [0.9, 0.93, 0.96, 1.0, 1.1, 1.3])
def test_few_settings_are_replayed_and_few_limits_of_each(limit, monkeypatch):
    replays = []

    def counted(shape, tuning, **named):
        replays.append(tuning.model_copy(update={"limit_gib": 0.0}))
        return reserved_within(shape, tuning, **named)

    monkeypatch.setattr(gpu_tuning, "reserved_within", counted)
    fastest(SMALL, ways("eight", limit), ADAPTED[6])
    assert len({replay.to_json() for replay in replays}) <= 12
    assert len(replays) <= 24
