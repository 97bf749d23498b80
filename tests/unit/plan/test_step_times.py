"""Steps of both engines come out as planned, over sizes, families and lengths that an H200 timed."""

from statistics import median

import pytest
from step_time_samples import errors_after_probe, predict, read_lines

from graftwork.plan.catalog.hardware import default_rates
from graftwork.plan.fit.candidates import TIME_SPREAD

FILES = ("step_times.jsonl", "step_times_reported.jsonl")


def errors(*, held_out: bool) -> dict[str, float]:
    """Planned over measured, less one. Steps of few layers are a probe's."""
    return {
        f"{line['name']} {line['setting']['engine']}": predict(line, default_rates()) / line["measured"] - 1
        for line in read_lines(*FILES)
        if not line["setting"].get("layers") and not (held_out and line["fitted"])
    }


def test_seconds_of_a_step_are_planned_within_15_percent_before_a_probe():
    for held_out in (False, True):
        found = errors(held_out=held_out)
        assert len(found) >= (16 if held_out else 24)
        assert median(abs(error) for error in found.values()) <= 0.15, found


def test_at_most_one_setting_in_twenty_is_outside_the_stated_range():
    found, spread = errors(held_out=False), TIME_SPREAD["computed"]
    outside = {name: error for name, error in found.items() if not 1 / spread <= 1 + error <= spread}
    assert len(outside) <= 0.05 * len(found), outside


@pytest.mark.parametrize("model", ["135m", "1.4b", "7b-qwen2"])
def test_a_probe_of_a_few_layers_foretells_steps_of_all(model):
    """Short rows of different lengths are the furthest off: a probe's are all of one length."""
    found = errors_after_probe(model)
    assert median(abs(error) for error in found.values()) <= 0.05, found
    assert max(abs(error) for error in found.values()) <= 0.10, found
