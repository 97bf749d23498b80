"""Is it stuck? Every answer has a reason, and the reason comes from the evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.process.heartbeat import WAITING_FOR_DATA, Heart, Patience, assess_health
from graftwork.records.fleet import Beat, DeviceVitals, Vitals

NOW = 1000.0
EAGER = Patience(slow_seconds=0.0, stuck_seconds=0.0, silent_seconds=30.0)
ORDER = ["working", "slow", "stuck"]


def beat(*, at=NOW, still=0.0, phase="training", doing="forward", vitals=None, **detail):
    detail = {"steps_here": 10, **detail, "seconds_since_move": still}
    return Beat(
        pid=7, phase=phase, done=3, total=9, at=at, started=0, detail=detail, doing=doing, vitals=vitals
    )


def vitals(**changes):
    usual = {"memory_limit_gib": 16.0, "memory_free_gib": 8.0, "load": 1.0, "cores": 2}
    return Vitals(**{"at": NOW, "memory_gib": 2.0, "cpu_cores": 1.5, **usual, **changes})


def health(given_beat, *, alive=True, expected=1.0, patience=EAGER, **more):
    age = NOW - given_beat.at if given_beat else 0.0
    return assess_health(
        given_beat, alive=alive, age=age, expected_seconds=expected, patience=patience, **more
    )


@pytest.mark.parametrize(
    ("given_beat", "alive", "found"),
    [
        (None, True, "starting"),
        (None, False, "gone"),
        (beat(), True, "working"),
        (beat(), False, "gone"),
        (beat(still=4.0), True, "slow"),
        (beat(still=11.0), True, "stuck"),
        (beat(at=NOW - 31), True, "stuck"),
        (beat(step_seconds=4.0), True, "slow"),
    ],
)
def test_health_is_judged_with_a_reason(given_beat, alive, found):
    judged = health(given_beat, alive=alive)
    assert judged.health == found
    assert judged.reason


@pytest.mark.parametrize(
    ("given_beat", "words"),
    [
        (beat(still=50, vitals=vitals(swapped_mib_per_second=12.0)), "swapping (12 MiB/s)"),
        (beat(still=50, vitals=vitals(memory_free_gib=0.2)), "only 0.2 GiB of 16.0 GiB"),
        (beat(still=50, vitals=vitals(memory_growth_gib_per_minute=2.0)), "limit is reached in 4 min"),
        (beat(still=50, doing="data", vitals=vitals()), "waits for data"),
        (beat(still=50, vitals=vitals(data_share=0.8)), "waits for data (80 % of the time)"),
        (
            beat(still=50, vitals=vitals(devices=(DeviceVitals(index=0, use_percent=1.0),))),
            "device is idle (1 % use)",
        ),
        (
            beat(still=50, vitals=vitals(devices=(DeviceVitals(index=1, temperature_c=91),))),
            "device 1 is at 91 °C",
        ),
        (beat(still=50, vitals=vitals(load=16.0)), "load 16 on 2 cores"),
        (beat(still=50, vitals=vitals(cpu_cores=0.0)), "the CPU is idle"),
        (beat(still=50, vitals=vitals()), "nothing in the machine's figures explains it"),
        (beat(still=50, vitals=None), "nothing in the machine's figures explains it"),
    ],
)
def test_a_stall_names_the_evidence_and_what_was_being_done(given_beat, words):
    judged = health(given_beat)
    assert judged.health == "stuck"
    assert words in judged.reason
    assert f"training ({given_beat.doing})" in judged.reason
    assert "expected 1.0 s" in judged.reason


@pytest.mark.parametrize(
    ("state", "words"), [("T", "kill -CONT"), ("D", "disk or a driver"), ("", "frozen or starved")]
)
def test_a_silent_process_is_distinguished_by_its_state(state, words):
    assert words in health(beat(at=NOW - 100), process_state=state).reason


def test_memory_that_runs_out_is_reported_while_all_still_works():
    judged = health(beat(vitals=vitals(memory_growth_gib_per_minute=1.0)))
    assert judged.health == "working"
    assert "the limit is reached in 8 min" in judged.reason


def test_a_short_wait_before_a_long_forward_pass_is_no_waiting_for_data(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("graftwork.process.clock.steady", lambda: now[0])
    heart = Heart(tmp_path, vitals=True)
    for doing, seconds in ((WAITING_FOR_DATA, 1.0), ("forward", 9.0)):
        heart.move(doing)
        now[0] += seconds
    heart._sample()
    assert heart._sampler.latest.data_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    "patient",
    [
        beat(still=25, phase="loading the base model", doing=""),
        beat(still=25, doing="checkpoint"),
        beat(still=25, doing=""),
        beat(still=25, steps_here=0),
    ],
)
def test_an_unplanned_phase_gets_more_time_than_a_step(patient):
    assert health(patient).health == "working"
    assert health(beat(still=25)).health == "stuck"


def test_planned_and_actual_seconds_are_shown_together():
    judged = health(beat(step_seconds=5.0), expected=1.5)
    assert (judged.expected_seconds, judged.measured_seconds) == (1.5, 5.0)
    assert "a step takes 5.0 s, the plan expected 1.5 s" in judged.reason


def test_hiccups_of_short_steps_raise_no_alarm():
    assert health(beat(still=5), expected=0.01, patience=Patience()).health == "working"
    assert health(beat(still=61), expected=0.01, patience=Patience()).health == "stuck"


times = st.floats(0, 1e5)


@given(still=times, more=times, expected=st.floats(1e-3, 1e3), stuck=st.floats(0.1, 600))
def test_a_longer_stall_never_looks_better(still, more, expected, stuck):
    patience = Patience(slow_seconds=stuck / 6, stuck_seconds=stuck, silent_seconds=stuck / 2)
    first = health(beat(still=still), expected=expected, patience=patience).health
    later = health(beat(still=still + more), expected=expected, patience=patience).health
    assert ORDER.index(later) >= ORDER.index(first)


@given(
    silent=times,
    still=times,
    alive=st.booleans(),
    doing=st.sampled_from(["", "data", "forward", "checkpoint"]),
    free=st.none() | st.floats(0, 16),
    growth=st.floats(-10, 10),
    share=st.none() | st.floats(0, 1),
    use=st.none() | st.floats(0, 100),
)
def test_every_answer_has_a_reason_and_a_dead_process_is_never_called_well(
    silent, still, alive, doing, free, growth, share, use
):
    found = vitals(
        memory_free_gib=free,
        memory_growth_gib_per_minute=growth,
        data_share=share,
        devices=(DeviceVitals(index=0, use_percent=use),),
    )
    judged = health(beat(at=NOW - silent, still=still, doing=doing, vitals=found), alive=alive)
    assert judged.reason
    assert (judged.health == "gone") is not alive
    assert all(sentence in judged.reason for sentence in judged.evidence)
