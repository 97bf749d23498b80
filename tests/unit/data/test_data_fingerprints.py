import subprocess
import sys

from data_rows import THINGS, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.dedup.fingerprints import (
    GRAM_WINDOW,
    GRAM_WORDS,
    KEYS,
    LINE_WORDS,
    LINES,
    NEAR,
    TURN,
    compute_fingerprints,
)
from graftwork.data.settings import DataSettings

LONG = " ".join(f"word{n}" for n in range(60))


def prints_of(*rows, **settings):
    return compute_fingerprints(rows, settings=DataSettings(**settings))


def values_of(ragged, name, place):
    values, offsets = ragged[name]
    return values[offsets[place] : offsets[place + 1]].tolist()


def test_case_spacing_and_punctuation_leave_no_print():
    fixed, _ = prints_of(make_row("Where is it?", "Here."), make_row("where  is IT", "here!"))
    for name in (*KEYS, *NEAR, *TURN):
        assert fixed[name][0] == fixed[name][1], name


def test_the_system_prompt_marks_the_prompt_alone():
    fixed, _ = prints_of(make_row("a?", "b", system="Be kind."), make_row("a?", "b", system="Be brief."))
    differing = [name for name in (*KEYS, *NEAR) if fixed[name][0] != fixed[name][1]]
    assert differing == ["prompt"]


def test_a_row_that_is_not_compared_has_no_fingerprints():
    fixed, ragged = prints_of(None, make_row(f"{LONG}\n{LONG}?", "c"), None)
    assert all(column[0] == column[2] == 0 for column in fixed.values())
    assert all(values_of(ragged, name, 0) == values_of(ragged, name, 2) == [] for name in ragged)
    alone_fixed, alone_ragged = prints_of(make_row(f"{LONG}\n{LONG}?", "c"))
    assert all(alone_fixed[name][0] == column[1] for name, column in fixed.items())
    assert all(values_of(alone_ragged, name, 0) == values_of(ragged, name, 1) for name in ragged)


def test_no_rows_have_no_prints():
    fixed, ragged = prints_of()
    assert all(len(column) == 0 for column in fixed.values())
    assert all(offsets.tolist() == [0] for _, offsets in ragged.values())


def test_the_last_lines_come_first_and_say_whether_they_ask():
    _, ragged = prints_of(
        make_row("\n".join(f"line {n}" for n in range(20)) + "\n\nWhy?\nAnswer as JSON.\n---")
    )
    lines = values_of(ragged, "lines", 0)
    assert len(lines) == LINES
    assert [line & 1 for line in lines] == [0, 1, 0, 0, 0, 0]
    assert len(values_of(ragged, "line_runs", 0)) == sum(values_of(ragged, "line_sizes", 0))


def test_a_turn_of_one_short_line_is_compared_as_a_line_only():
    (short, _), (long, _) = prints_of(make_row("Where is it?")), prints_of(make_row(LONG))
    assert len(LONG.split()) > LINE_WORDS
    assert short[TURN[0]][0] == 0 != long[TURN[0]][0]


def test_rows_that_must_stay_together_are_found_by_their_name():
    rows = [
        make_row("a", session="s", extra={"task": {"id": 7}}),
        make_row("b", session="s", extra={"task": {"id": 8}}),
        make_row("c", extra={"task": "none"}),
    ]
    assert prints_of(*rows)[0]["together"].tolist() == [0, 0, 0]
    by_session = prints_of(*rows, split_by="session")[0]["together"]
    assert by_session[0] == by_session[1] != 0 == by_session[2]
    by_key = prints_of(*rows, split_by="task.id")[0]["together"]
    assert 0 not in by_key[:2]
    assert by_key[0] != by_key[1]
    assert by_key[2] == 0


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
@settings(max_examples=60)
def test_turns_that_share_a_long_run_of_words_share_a_13_gram(before, other_before, after):
    shared = " ".join(f"shared{n}" for n in range(GRAM_WORDS + GRAM_WINDOW - 1))
    rows = [
        make_row(
            " ".join([*(f"{name}{n}" for n in range(size)), shared, *(f"{name}x{n}" for n in range(after))])
        )
        for name, size in (("one", before), ("two", other_before))
    ]
    _, ragged = prints_of(*rows)
    assert set(values_of(ragged, "grams", 0)) & set(values_of(ragged, "grams", 1))


def test_prints_are_the_same_in_another_process():
    program = (
        "from graftwork.data.dedup.fingerprints import compute_fingerprints\n"
        "from graftwork.data.settings import DataSettings\n"
        "from graftwork.records.interaction import Interaction, Message, Origin\n"
        f"row = Interaction(id='1', origin=Origin(file='f', line=1), reply='{THINGS[0]}',"
        f" messages=(Message(role='user', content='{LONG}'),))\n"
        "fixed, ragged = compute_fingerprints([row], settings=DataSettings())\n"
        "print(sum(int(c[0]) for c in fixed.values()),"
        " sum(int(v.sum()) for v, _ in ragged.values()))"
    )
    output = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(output) == 1
