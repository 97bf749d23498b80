"""What a probe measured decides; what it could not have measured is not invented."""

import pytest
import sample_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_step_time
from graftwork.costmodel.probed_rates import probe_figures, rates_of_probe, whole_model_speed
from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.records.plan import DeviceName, ProbedStep, ProbeFacts, ProductRate, Tuning

SHAPE = find_model("qwen2.5-7b").shape
TRAINABLE_A_LAYER = 40_370_176 // 28
CARD = DeviceName(kind="cuda", name="NVIDIA Some Card", driver="580.1", torch="2.11.0")
PROCESSOR = DeviceName(kind="cpu", name="Some Processor", torch="2.13.0")


def make_tuning(layers, tokens, form="whole") -> Tuning:
    chunks = {"micro_tokens": tokens, "chunk_tokens": min(tokens, 4096), "head_tokens": 2048, "longest": 2048}
    head = "eight" if form == "eight" else "whole"
    return sample_plans.make_tuning(form=form, head=head, keep=layers, limit_gib=80, peak_gib=20, **chunks)


def seconds_on(rates: StepRates, layers, tokens, form="whole") -> float:
    step = gpu_step_time(
        SHAPE.model_copy(update={"layers": layers}),
        make_tuning(layers, tokens, form),
        TrainedPart(adapted=layers, trainable=TRAINABLE_A_LAYER * layers, rates=rates),
        RowStatistics(mean_length=2048),
    )
    return sum(step.parts.values()) + sum(step.once_per_step.values())


def make_facts(*, steps=(), device=CARD, half=700e12, eight=1300e12, **changes) -> ProbeFacts:
    kinds = {"bfloat16": half, "fp8": eight} if device.kind == "cuda" else {"float32": 80e9}
    products = tuple(
        ProductRate(layer=layer, tokens=tokens, inputs=3584, outputs=18944, dtype=dtype, flops=rate * share)
        for dtype, rate in kinds.items()
        if rate
        for layer in ("qkv", "gate_up")
        for tokens, share in ((256, 0.4), (4096, 1.0))
    )
    return ProbeFacts(
        device=device,
        memory_gib=80,
        capability=9.0 if device.kind == "cuda" else None,
        threads=8,
        shape=SHAPE,
        rank=16,
        products=products,
        copy_bytes_s=4e12 if device.kind == "cuda" else 2e10,
        to_device_bytes_s=50e9,
        launch_seconds=4e-6,
        steps=steps,
        seconds=25,
        at="2026-11-15T12:00:00+00:00",
        **changes,
    )


def probed_step(layers, tokens, seconds, form="whole") -> ProbedStep:
    return ProbedStep(
        layers=layers,
        tokens=tokens,
        length=2048,
        trainable=TRAINABLE_A_LAYER * layers,
        seconds=seconds,
        spread=0.01,
        peak_bytes=1e10,
        tuning=make_tuning(layers, tokens, form),
    )


def real_card(slower, head, fixed, a_layer) -> StepRates:
    """A card as it might be: some way off the estimate from its products alone."""
    return rates_of_probe(make_facts()).model_copy(
        update={
            "layer_factor": slower,
            "head_factor": head,
            "fixed_seconds": fixed,
            "fixed_per_layer": a_layer,
        }
    )


@pytest.mark.parametrize("name", ["H100 SXM", "A100 80GB", "RTX 4090", "RTX A6000", "T4"])
def test_a_probe_keeps_the_time_of_float32_products(name):
    gpu = find_gpu(name)
    device = CARD.model_copy(update={"name": f"NVIDIA {name}"})
    facts = make_facts(device=device, half=gpu.half_tflops * 1e12 * 0.75, eight=None)
    probed = rates_of_probe(facts.model_copy(update={"capability": gpu.capability}))
    assert probed.single == pytest.approx(rates_of(gpu).single, rel=0.3)


@given(st.floats(0.7, 1.6), st.floats(0.7, 1.6), st.floats(0, 0.01), st.floats(0, 0.001))
@settings(max_examples=30, deadline=None)
def test_probes_of_two_and_four_layers_at_two_sizes_predict_the_whole_model(slower, head, fixed, a_layer):
    real = real_card(slower, head, fixed, a_layer)
    steps = tuple(
        probed_step(layers, tokens, seconds_on(real, layers, tokens))
        for layers in (2, 4)
        for tokens in (2048, 8192)
    )
    found = rates_of_probe(make_facts(steps=steps))
    for tokens in (2048, 4096, 8192):
        assert seconds_on(found, 28, tokens) == pytest.approx(seconds_on(real, 28, tokens), rel=0.03)


@given(st.floats(0.8, 1.4))
@settings(max_examples=20, deadline=None)
def test_one_probed_size_predicts_that_size(slower):
    real = real_card(slower, 1.0, 0.002, 0.0002)
    steps = tuple(probed_step(layers, 8192, seconds_on(real, layers, 8192)) for layers in (2, 4))
    found = rates_of_probe(make_facts(steps=steps))
    assert seconds_on(found, 28, 8192) == pytest.approx(seconds_on(real, 28, 8192), rel=0.03)


def test_each_form_of_the_weights_has_its_own_factor():
    real = real_card(1.0, 1.0, 0.002, 0.0002).model_copy(
        update={"form_factors": {"whole": 1.3, "eight": 0.9}}
    )
    steps = tuple(
        probed_step(layers, tokens, seconds_on(real, layers, tokens, form), form)
        for layers in (2, 4)
        for tokens in (2048, 8192)
        for form in ("whole", "eight")
    )
    found = rates_of_probe(make_facts(steps=steps))
    assert found.form_factors["whole"] == pytest.approx(1.3, rel=0.05)
    assert found.form_factors["eight"] == pytest.approx(0.9, rel=0.05)


def test_products_alone_already_make_probed_rates():
    rates = rates_of_probe(make_facts(eight=None))
    assert rates.certainty == "probed"
    assert 0.8 * 700e12 < rates.half < 700e12
    assert rates.eight is None
    assert rates.launch_seconds == 4e-6


def test_a_step_that_is_absurd_does_not_make_the_rates_absurd():
    steps = tuple(probed_step(layers, 8192, seconds) for layers, seconds in ((2, 9.0), (4, 1.0)))
    rates = rates_of_probe(make_facts(steps=steps))
    assert 0.3 < rates.layer_factor < 3
    assert rates.fixed_seconds >= 0


def test_a_processor_has_no_rates_of_a_card():
    with pytest.raises(ValueError, match="a CPU has no GPU"):
        rates_of_probe(make_facts(device=PROCESSOR))


def test_figures_name_only_what_was_measured_and_hold_their_values():
    figures = probe_figures(make_facts(context_bytes=None))
    assert "context_gib" not in figures
    assert "disk_read_mb_s" not in figures
    assert "tokens_per_second" not in figures
    assert figures["products_bfloat16_tflops"].value == pytest.approx(700)
    assert figures["launch_microseconds"].value == pytest.approx(4)


def test_the_whole_model_is_drawn_out_from_two_and_four_layers():
    steps = (probed_step(2, 8192, 0.05), probed_step(4, 8192, 0.08))
    speed = whole_model_speed(make_facts(steps=steps))
    assert speed.value == pytest.approx(8192 / (0.08 + 24 * 0.015))
    assert speed.low < speed.value < speed.high


def test_four_layers_that_took_no_longer_than_two_say_nothing():
    steps = (probed_step(2, 8192, 0.08), probed_step(4, 8192, 0.07))
    assert whole_model_speed(make_facts(steps=steps)) is None
