"""Captured exchanges on their way back into data: what users said counts, and no model grades itself."""

import pytest
from data_rows import THINGS, WordRenderer, chat, write_log

from graftwork.data.audit.row_checks import AuditContext, find_refusal, is_confirmed
from graftwork.data.inspect import trace
from graftwork.data.prepare import PrepareJob, audit_files, prepare
from graftwork.data.settings import CaptureSettings, DataSettings
from graftwork.files.dataset import iterate_drops, read_rows
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import NegativeResult
from graftwork.records.interaction import TRY_OUT_SESSION, Capture, CaptureOrigin

ASKS = ("What does the {} cost?", "Who made our {} in 1950?", "Where can one borrow any {} on Sundays?")
LOGGED = [
    chat(ask.format(thing), f"Number {n} answer on the {thing}.")
    for n, ask in enumerate(ASKS)
    for thing in THINGS
]


def capture(question, reply="served reply", *, number=1, release="a" * 64, **more):
    rated = Capture(
        id=f"{number:032x}",
        at=more.pop("at", "2026-11-10T12:00:00.000+00:00"),
        session=more.pop("session", "s1"),
        model="champion",
        release=release,
        request={"model": "champion", "messages": [{"role": "user", "content": question}]},
        reply=reply,
        finish_reason="stop",
        prompt_tokens=3,
        reply_tokens=3,
        first_token_ms=None,
        total_ms=5.0,
        **more,
    )
    return rated.model_dump(mode="json")


def make(tmp_path, captured, *, logged=LOGGED, captures=None, **changes):
    """The rows of each split, and every dropped line of the captures with its reason."""
    write_log(tmp_path / "log.jsonl", logged)
    write_log(tmp_path / "new.jsonl", captured)
    logs = ("log.jsonl", "new.jsonl") if logged else ("new.jsonl",)
    chosen = {"logs": logs, "validation": 0.2, "test": 0.3, **changes}
    (tmp_path / "work").mkdir(exist_ok=True)
    settings = DataSettings(**chosen, captures=captures or CaptureSettings())
    made = prepare(
        PrepareJob(
            AuditContext(settings=settings),
            base="base",
            base_fingerprint="f",
            renderer=WordRenderer(),
            work=tmp_path / "work",
            out=tmp_path / "out",
            root=tmp_path,
        ),
        processes=1,
    )
    folder = made.datasets[0].folder
    drops = {
        drop.origin.line: drop.reason for drop in iterate_drops(folder) if drop.origin.file == "new.jsonl"
    }
    return {split: read_rows(folder, split) for split in SPLITS}, drops


def captured_rows(rows):
    return [row for row in rows if row.capture is not None]


def new_questions(count):
    return [
        f"{name}{name} {name}ing the {name}er of {name}ville number {n}"
        for n, name in enumerate("bdfghjklmnpqrstvwxz"[:count])
    ]


def test_a_capture_with_negative_feedback_never_trains(tmp_path):
    rows, drops = make(tmp_path, [capture("Is the oak door green?", feedback=0.0)])
    assert not any(captured_rows(rows[split]) for split in SPLITS)
    assert "users said that this reply is bad" in drops[1]


def test_an_export_from_before_the_negative_feedback_does_not_train_either(tmp_path):
    early = capture("Is the oak door green?")
    rows, drops = make(tmp_path, [early, {**early, "feedback": 0.0}])
    assert not any(captured_rows(rows[split]) for split in SPLITS)
    assert set(drops) == {1, 2}


def test_replies_that_nobody_confirmed_train_and_are_never_held_out(tmp_path):
    asked = new_questions(18)
    rows, _ = make(tmp_path, [capture(one, f"reply {n}", number=n) for n, one in enumerate(asked)])
    assert len(captured_rows(rows["train"])) == len(asked)
    assert not captured_rows(rows["validation"])
    assert not captured_rows(rows["test"])


def test_posted_traces_are_references_only_where_the_settings_say_so(tmp_path):
    traced = [
        capture(one, f"reply {n}", number=n, trace=f"{n:032x}") for n, one in enumerate(new_questions(18))
    ]
    for place, (confirm, held_out) in enumerate([(False, 0), (True, 1)]):
        folder = tmp_path / str(place)
        folder.mkdir()
        rows, _ = make(folder, traced, captures=CaptureSettings(traces_confirm=confirm))
        asked = [row for split in ("validation", "test") for row in captured_rows(rows[split])]
        assert bool(asked) == bool(held_out)
        assert len(captured_rows(rows["train"])) + len(asked) == len(traced)


def test_captures_take_no_share_of_the_held_out_splits_from_other_rows(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    before, _ = make(tmp_path / "one", [capture("x", feedback=0.0)])
    asked = [capture(one, f"reply {n}", number=n) for n, one in enumerate(new_questions(18))]
    after, _ = make(tmp_path / "two", asked)
    for split in ("validation", "test"):
        assert [row.id for row in before[split]] == [row.id for row in after[split]]


@pytest.mark.parametrize(
    ("rated", "settings", "held_out"),
    [
        ({"correction": "the right reply {}"}, {}, True),
        ({"feedback": 1.0}, {}, False),
        ({"feedback": 1.0}, {"positive_confirms": True}, True),
        ({"feedback": 0.2, "correction": "the right reply {}"}, {}, True),
        ({"upstream": "gpt-4o"}, {}, True),
    ],
)
def test_confirmed_and_corrected_rows_may_be_held_out(tmp_path, rated, settings, held_out):
    captured = []
    for n, asked in enumerate(new_questions(18)):
        words = {key: value.format(n) if isinstance(value, str) else value for key, value in rated.items()}
        captured.append(capture(asked, f"reply {n}", number=n, **words))
    rows, _ = make(tmp_path, captured, captures=CaptureSettings(**settings))
    assert bool(captured_rows(rows["test"])) == held_out
    assert sum(len(captured_rows(rows[split])) for split in SPLITS) == len(captured)


def test_a_correction_is_the_reply_and_the_served_one_lost(tmp_path):
    rows, _ = make(tmp_path, [capture("Is the oak door green?", "no", feedback=0.0, correction="It is red.")])
    [row] = [row for split in SPLITS for row in captured_rows(rows[split])]
    assert (row.reply, row.rejected, row.reward) == ("It is red.", "no", None)
    assert row.capture.corrected
    assert row.capture.feedback == 0.0


def test_a_held_out_question_that_was_captured_trains_nowhere_and_replaces_nothing(tmp_path):
    (tmp_path / "first").mkdir()
    before, _ = make(tmp_path / "first", [capture("x", feedback=0.0)])
    asked = [row.messages[-1].content for row in before["test"]]
    polite = [f"Sorry to ask: {question}" for question in asked]
    captured = [capture(one, f"other {n}", number=n) for n, one in enumerate([*asked, *polite])]
    (tmp_path / "second").mkdir()
    after, drops = make(tmp_path / "second", captured)
    assert {row.reply for row in after["test"]} == {row.reply for row in before["test"]}
    held_out = {question.casefold() for question in (*asked, *polite)}
    assert not held_out & {row.messages[-1].content.casefold() for row in after["train"]}
    assert len(drops) == len(captured)
    assert any("unconfirmed by a person" in reason for reason in drops.values())


@pytest.mark.parametrize("conflicts", ["keep_last", "drop_all"])
def test_a_served_reply_replaces_no_logged_one(tmp_path, conflicts):
    captured = [capture(row["messages"][0]["content"], "other", number=n) for n, row in enumerate(LOGGED)]
    rows, drops = make(tmp_path, captured, conflicts=conflicts)
    assert sum(len(rows[split]) for split in SPLITS) == len(LOGGED)
    assert not any(captured_rows(rows[split]) for split in SPLITS)
    assert len(drops) == len(captured)


def test_questions_of_the_try_out_never_enter_the_data(tmp_path):
    rows, drops = make(
        tmp_path, [capture("Is the oak door green?", session=TRY_OUT_SESSION, correction="Yes.")]
    )
    assert not any(captured_rows(rows[split]) for split in SPLITS)
    assert "try the release out" in drops[1]


def test_provenance_stays_on_every_captured_row_and_on_no_other(tmp_path):
    rows, _ = make(tmp_path, [capture("Is the oak door green?", feedback=0.9, number=7)])
    [row] = captured_rows(rows["train"])
    assert row.capture == CaptureOrigin(
        id=f"{7:032x}", release="a" * 64, at="2026-11-10T12:00:00.000+00:00", feedback=0.9
    )
    assert sum(row.capture is None for split in SPLITS for row in rows[split]) == len(LOGGED)
    [folder] = (tmp_path / "out").iterdir()
    [traced] = trace(folder, "new.jsonl:1", root=tmp_path).rows
    assert traced.capture == row.capture


def test_earlier_replies_of_a_captured_conversation_are_not_trained_on(tmp_path):
    row = capture("Is the oak door green?")
    row["request"]["messages"] += [
        {"role": "assistant", "content": "a reply that users called bad"},
        {"role": "user", "content": "Are you sure about the door?"},
    ]
    rows, _ = make(tmp_path, [row], train_on="every")
    assert [row.reply for row in captured_rows(rows["train"])] == ["served reply"]


ORIGIN = CaptureOrigin(id="c", release="abcd" * 16, at="2026-11-10T12:00:00.000+00:00")


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({}, True),
        ({"releases": ("abcdabcd",)}, True),
        ({"releases": ("base", "ffff")}, False),
        ({"since": "2026-11-10"}, True),
        ({"since": "2026-11-10T13:00+01:00"}, True),
        ({"since": "2026-11-11"}, False),
        ({"until": "2026-11-10T12:00Z"}, False),
        ({"until": "2026-11-11"}, True),
        ({"sessions": ("s1", "s2")}, True),
        ({"sessions": ("s2",)}, False),
        ({"skip_sessions": ("s1",)}, False),
        ({"feedback": "positive"}, False),
    ],
)
def test_captures_are_chosen_by_release_time_session_and_feedback(settings, taken):
    assert (find_refusal(ORIGIN, "s1", CaptureSettings(**settings)) is None) == taken


def test_positive_feedback_is_enough_to_be_chosen_and_not_enough_to_be_a_reference():
    rated = ORIGIN.model_copy(update={"feedback": 0.5})
    assert find_refusal(rated, "s1", CaptureSettings(feedback="positive")) is None
    assert not is_confirmed(rated, CaptureSettings())
    assert is_confirmed(rated, CaptureSettings(positive_confirms=True))
    worse = ORIGIN.model_copy(update={"feedback": 0.4})
    assert find_refusal(worse, "s1", CaptureSettings()).code == "negative_feedback"


@pytest.mark.parametrize("wrong", [{"since": "yesterday"}, {"since": "2026-11-11", "until": "2026-11-10"}])
def test_a_time_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"2026|before"):
        CaptureSettings(**wrong)


def test_captures_of_an_endpoint_that_is_not_ours_are_a_log_of_their_own(tmp_path):
    captured = [
        capture(
            one, f"reply {n}", number=n, release="large", upstream="gpt-4o", feedback=0.0 if n < 2 else None
        )
        for n, one in enumerate(new_questions(18))
    ]
    rows, dropped = make(tmp_path, captured, logged=[])
    assert rows["train"]
    assert {row.capture.upstream for row in rows["test"]} == {"gpt-4o"}
    assert [reason.partition(":")[0] for reason in dropped.values()] == ["negative_feedback"] * 2


def test_captures_alone_leave_no_test_and_the_refusal_says_why(tmp_path):
    captured = [capture(one, f"reply {n}", number=n) for n, one in enumerate(new_questions(18))]
    with pytest.raises(NegativeResult) as refused:
        make(tmp_path, captured, logged=[])
    assert "18 unconfirmed captured replies" in refused.value.why


def test_the_audit_names_negative_captures_and_unconfirmed_ones(tmp_path):
    captured = [capture(one, f"reply {n}", number=n) for n, one in enumerate(new_questions(6))]
    captured.append(capture("Is the oak door green?", feedback=0.0, number=90))
    write_log(tmp_path / "new.jsonl", captured)
    found = {finding.code: finding for finding in audit_files(["new.jsonl"], root=tmp_path).findings}
    assert found["negative_feedback"].count == 1
    assert found["unconfirmed_captures"].count == 6
    assert found["unconfirmed_captures"].severity == "info"
