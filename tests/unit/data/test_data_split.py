import itertools
from collections import Counter

import numpy as np
import pytest
from columns_in_memory import ColumnsInMemory
from data_rows import THINGS, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.dedup.questions import open_windows
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import UNASSIGNED, assign_splits, draw
from graftwork.data.split.leakage import find_leaks
from graftwork.records.interaction import CaptureOrigin, Message

SETTINGS = DataSettings(validation=0.2, test=0.3)
# The first rows of a log have no ground: nothing is known yet of what its rows share.
EARLIER = [make_row(f"{name} {name}ing {name}ed {name}s?") for name in "bdfghjkl"]


def assign_group(rows, *, passed=None, block=7, chosen=SETTINGS):
    return assign_splits(ColumnsInMemory(rows, settings=chosen, passed=passed, block=block), settings=chosen)


def groups_of(*questions):
    """The groups of rows that are not the first of their log."""
    rows = [*EARLIER, *(make_row(question) for question in questions)]
    return assign_group(rows).group.tolist()[len(EARLIER) :]


def test_small_changes_of_wording_share_a_group():
    others = [f"What does the {thing} cost in March {n}?" for n, thing in enumerate(THINGS)]
    groups = groups_of(
        *others,
        "How long may I keep the oak psaltery?",
        "how long may I keep the oak psaltery",
        "Sorry to ask again: how long may I keep the oak psaltery?",
        "How long may I keep the oak psaltery? Thanks!",
    )
    assert len(set(groups[-4:])) == 1
    assert groups[-1] not in groups[:-4]


def long_reply(number):
    names = [f"{name}{number}" for name in (*THINGS, *"abcdefghij")]
    return f"Take the {' and the '.join(names)} to the desk, and ask there for number {number}."


def test_paraphrases_with_the_same_long_reply_share_a_group_and_a_split():
    asks = ("Where do I return {}{}?", "how to give {}{} back", "{}{} is due, what now", "I borrowed {}{}.")
    rows = [
        make_row(ask.format(number, "bcdf"[place] * 5), long_reply(number) + " Thanks!" * place)
        for place, ask in enumerate(asks)
        for number in range(30)
    ]
    found = assign_group([*EARLIER, *rows])
    splits = found.split[len(EARLIER) :].reshape(len(asks), 30)
    assert all(len(set(column) - {UNASSIGNED}) == 1 for column in splits.T.tolist())
    groups = found.group[len(EARLIER) :].reshape(len(asks), 30)
    assert len(set(groups[0].tolist())) == 30


def test_a_canned_long_reply_groups_few_rows():
    rows = [
        make_row(f"What about {name * 4} {name}x{name}?", long_reply(1)) for name in "bcdfghjklmnpqrstvwxz"
    ]
    assert len(set(assign_group(rows).group.tolist())) > len(rows) / 3


def test_a_template_filled_with_other_things_is_other_questions():
    groups = groups_of(*(f"What would I pay for the {thing}?" for thing in (*THINGS, *"mnopqrstuvwx")))
    assert len(set(groups[8:])) == len(groups[8:])


def test_the_same_question_on_other_sources_shares_a_group():
    groups = groups_of(
        "Sources:\n[1] Doors open at nine in summer.\n\nQuestion: When do you open?",
        "Sources:\n[1] The east wing has a new roof.\n[2] Tea is free.\n\nQuestion: When do you open?",
        "Sources:\n[1] The east wing has a new roof.\n[2] Cake is not.\n\nQuestion: Who built the tower?",
    )
    assert groups[0] == groups[1] != groups[2]


def test_an_instruction_that_every_row_repeats_is_no_question():
    rows = [make_row(f"Query: What is a {thing}?\n\nAnswer as JSON.") for thing in (*THINGS, *"mnopqrstuvwx")]
    groups = assign_group(rows).group.tolist()
    # After seeing a line at most five times one cannot distinguish an instruction from a question.
    assert len(set(groups[:6])) == 1
    assert len(set(groups[6:])) == len(groups[6:])


def test_a_question_above_a_line_that_only_some_rows_have_is_found():
    plain = "Query: How did the harp come to Wales?"
    groups = groups_of(plain, *(f"Query: What is a {thing}?" for thing in THINGS), f"{plain}\nNo documents.")
    assert groups[0] == groups[-1]


def test_turns_of_one_conversation_stay_together():
    opening = make_row("Tell me of harps", session="s1")
    later = opening.model_copy(
        update={"messages": (*opening.messages, Message(role="user", content="And who invented them?"))}
    )
    stranger = make_row("Where do tubas come from?", session="s1")
    groups = assign_group([*EARLIER, opening, later, stranger]).group.tolist()[len(EARLIER) :]
    assert groups[0] == groups[1] != groups[2]


def make_chat(*turns, **more):
    """A conversation: the user's turns, each but the last answered."""
    row = make_row(turns[0], **more)
    messages = [row.messages[0]]
    for turn in turns[1:]:
        messages += [Message(role="assistant", content="Surely."), Message(role="user", content=turn)]
    return row.model_copy(update={"messages": tuple(messages)})


TICKETS = (
    *("How do I reset my password?", "My invoice of March shows a charge I never made."),
    *("The app crashes when I upload a photo", "Can I move my booking to Friday next week"),
    *("Please cancel the second subscription", "Why is delivery to Norway so expensive?"),
    *("Where do I find the serial number of the pump?", "Is there a student discount on the annual plan"),
    *("The courier left the parcel at the wrong door", "How many users may share one licence?"),
    *("I was charged twice for order 1182", "Do you ship batteries by air?"),
    *("My login code never arrives by SMS", "What is the warranty on refurbished laptops?"),
    *("Change the delivery address of my order please", "Does the pro tier include phone support?"),
)


@pytest.mark.parametrize("ending", ["Thanks, and region?", "Thank you. And which region does this apply to?"])
def test_conversations_that_end_alike_are_groups_of_their_own(ending):
    assigned = assign_group([make_chat(ticket, ending) for ticket in TICKETS])
    sizes = Counter(assigned.group.tolist())
    # While a question of several words stands in few rows, it may be a rare one: they stay together.
    assert max(sizes.values()) <= 5
    assert len(sizes) >= len(TICKETS) - 4
    assert set(assigned.split.tolist()) == {0, 1, 2}


def test_conversations_that_open_with_a_greeting_go_by_what_is_asked_later():
    again = make_chat("Hi", "how do I reset the password")
    groups = assign_group([*(make_chat("Hi", ticket) for ticket in TICKETS), again]).group.tolist()
    assert len(set(groups[:-1])) == len(TICKETS)
    assert groups[-1] == groups[0]


def test_the_same_conversation_in_nearly_the_same_words_is_one_group():
    rows = [
        make_chat("How long may I keep the oak psaltery?", "And may a friend play it meanwhile?"),
        make_chat("how long may I keep the oak psaltery", "and may a friend play it meanwhile, please?"),
        make_chat("How long may I keep the brass tuba?", "And what if I break it on a journey?"),
    ]
    groups = assign_group([*EARLIER, *rows]).group.tolist()[len(EARLIER) :]
    assert groups[0] == groups[1] != groups[2]


@pytest.mark.parametrize(
    "turns",
    [
        ("Hello!", "How long may I keep the oak psaltery?"),
        ("How long may I keep the oak psaltery?", "Thanks!"),
        ("Who built the tower?", "Fine. Next question.\nHow long may I keep the oak psaltery?"),
    ],
)
def test_a_conversation_shares_the_group_of_a_single_question_that_it_asks(turns):
    rows = [make_row("How long may I keep the oak psaltery?"), make_chat(*turns)]
    groups = assign_group([*EARLIER, *rows]).group.tolist()[len(EARLIER) :]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ("split_by", "together"), [("session", True), ("task.id", True), ("question", False)]
)
def test_groups_named_by_the_user_are_never_split(split_by, together):
    rows = [make_row(f"{thing} of old?", session="s", extra={"task": {"id": 3}}) for thing in THINGS]
    chosen = SETTINGS.model_copy(update={"split_by": split_by})
    assert (len(set(assign_group(rows, chosen=chosen).group.tolist())) == 1) == together


def test_a_copied_passage_without_its_question_shares_a_group():
    passage = " ".join(f"{thing} and {other}" for thing, other in itertools.pairwise(THINGS))
    groups = groups_of(f"Is this right?\n{passage}", f"Sum up for a child.\n{passage} in the end")
    assert groups[0] == groups[1]


def test_a_passage_that_many_rows_share_joins_nothing_more():
    passage = " ".join(f"{thing} and {other}" for thing, other in itertools.pairwise(THINGS))
    asked = [f"{passage}\n{word} {word}y or {word}ish to {word}?" for word in ("red", "dry", "hot", *THINGS)]
    groups = groups_of(*asked)
    assert len(set(groups[-4:])) == 4


def test_a_row_that_would_join_two_splits_is_set_aside_by_name():
    questions = [f"{thing} {thing}ing the {other}?" for thing in THINGS for other in ("moon", "sun")]
    rows = [*EARLIER, *(make_row(question, session=f"s{n}") for n, question in enumerate(questions))]
    split = assign_group(rows).split.tolist()
    one = len(EARLIER)
    other = next(place for place in range(one, len(rows)) if split[place] != split[one])
    bridge = rows[one].model_copy(
        update={"messages": (*rows[one].messages, Message(role="user", content=rows[other].question))}
    )
    assignment = assign_group([*rows, bridge, bridge])
    assert assignment.split.tolist() == [*split, UNASSIGNED, UNASSIGNED]
    assert assignment.excluded == {len(rows): (one, other), len(rows) + 1: (one, other)}
    assert assignment.group[-1] == -1


def test_rows_that_did_not_pass_are_not_assigned():
    rows = [make_row("a b c?"), make_row("a b c?"), make_row("d e f?")]
    assignment = assign_group(rows, passed=[True, False, True])
    assert assignment.split[1] == UNASSIGNED
    assert assignment.group.tolist()[1] == -1
    assert not assignment.excluded


WORDS = [*THINGS[:5], "where", "is", "the", "how", "old"]
PASSAGES = [" ".join(f"{word}{n}" for n in range(24)) for word in ("left", "right", "up")]


CAPTURED = CaptureOrigin(id="c", release="r", at="2026-11-10T12:00:00+00:00")


@st.composite
def logs(draw, most=26):
    """Rows that share words, passages, instructions and conversations in every way."""
    rows = []
    for _ in range(draw(st.integers(0, most))):
        question = " ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5)))
        parts = draw(st.lists(st.sampled_from(PASSAGES), max_size=2))
        parts.append(question + draw(st.sampled_from(["?", ""])))
        parts += draw(st.sampled_from([[], [], ["Answer as JSON."], ["No documents."]]))
        row = make_row(
            "\n".join(parts),
            session=draw(st.sampled_from([None, None, "s1", "s2"])),
            group=draw(st.sampled_from(["coder", "writer"])),
            capture=draw(st.sampled_from([None, None, None, CAPTURED])),
        )
        if draw(st.integers(0, 5)) == 0 and rows:
            earlier = draw(st.sampled_from(rows))
            row = row.model_copy(
                update={"messages": (*earlier.messages, *row.messages), "session": earlier.session}
            )
        rows.append(row)
    return rows


CHOSEN = st.builds(
    DataSettings,
    validation=st.just(0.2),
    test=st.just(0.3),
    stratify=st.sampled_from(["role", "nothing"]),
    split_by=st.sampled_from(["question", "session"]),
    seed=st.integers(0, 3),
)


@given(logs(), CHOSEN, st.data())
@settings(max_examples=20, deadline=None)
def test_rows_that_are_logged_later_move_no_row(rows, chosen, data):
    cut = data.draw(st.integers(0, len(rows)))
    before, after = assign_group(rows[:cut], chosen=chosen), assign_group(rows, chosen=chosen, block=5)
    assert before.split.tolist() == after.split.tolist()[:cut]
    assert before.excluded == {place: pair for place, pair in after.excluded.items() if place < cut}


@given(logs(), CHOSEN)
@settings(max_examples=20, deadline=None)
def test_groups_are_not_divided_and_nothing_leaks(rows, chosen):
    columns = ColumnsInMemory(rows, settings=chosen)
    assignment = assign_splits(columns, settings=chosen)
    splits_of = {}
    for group, split in zip(assignment.group.tolist(), assignment.split.tolist(), strict=True):
        assert (group == -1) == (split == UNASSIGNED)
        splits_of.setdefault(group, set()).add(split)
    assert all(len(splits) == 1 for splits in splits_of.values())
    for one, other in assignment.excluded.values():
        assert assignment.split[one] != assignment.split[other]
    assert find_leaks(columns, assignment, np.ones(len(rows), dtype=bool), settings=chosen) == []


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_long_logs_are_stable_and_do_not_leak_either(data):
    """Long enough for several grounds; drawn by a seed, since so many single draws would take minutes."""
    random = data.draw(st.randoms(use_true_random=False))
    rows = []
    for _ in range(random.randint(80, 150)):
        lines = random.sample(PASSAGES, random.choice([0, 0, 0, 1, 2]))
        lines.append(
            " ".join(random.choices([*WORDS, *THINGS], k=random.randint(2, 7))) + random.choice("?.")
        )
        lines += random.choice([[], ["Answer as JSON."], ["Be brief.", "Answer as JSON."]])
        row = make_row("\n".join(lines), group=random.choice(["coder", "writer"]))
        if random.random() < 0.3:
            turns = random.choices(["Hi", "Thanks, and region?", "Who made the harp of old?", *WORDS], k=2)
            row = make_chat(*random.sample([lines[0], *turns], 3), group=row.group)
        rows.append(row)
    cut = random.randint(0, len(rows))
    columns = ColumnsInMemory(rows, settings=SETTINGS, block=40)
    assignment = assign_splits(columns, settings=SETTINGS)
    assert assign_group(rows[:cut]).split.tolist() == assignment.split.tolist()[:cut]
    assert find_leaks(columns, assignment, np.ones(len(rows), dtype=bool), settings=SETTINGS) == []


@given(st.lists(st.sampled_from(["coder", "writer", None]), max_size=60), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_role_is_within_one_group_of_its_shares(roles, seed):
    # Numbers as words, spelled apart, so that every row is a group of its own.
    rows = [
        make_row(" ".join(f"{digit}{place}{n}" for place, digit in enumerate("abcdef")), group=role)
        for n, role in enumerate(roles)
    ]
    chosen = SETTINGS.model_copy(update={"seed": seed})
    assignment = assign_group(rows, chosen=chosen, block=30)
    assert len(set(assignment.group.tolist())) == len(rows)
    for role in set(roles):
        counts = Counter(
            split for split, of in zip(assignment.split.tolist(), roles, strict=True) if of == role
        )
        total = counts.total()
        for split, share in enumerate((0.5, 0.2, 0.3)):
            assert abs(counts[split] - share * total) <= 1 + 1e-9


def test_assigning_twice_gives_the_same_and_another_seed_reassigns_everything():
    rows = [make_row(f"{thing} {n} {thing}{n}?") for n, thing in enumerate(THINGS * 3)]
    again = SETTINGS.model_copy(update={"seed": 1})
    assert assign_group(rows).split.tolist() == assign_group(rows, block=3).split.tolist()
    assert assign_group(rows).split.tolist() != assign_group(rows, chosen=again).split.tolist()


def test_split_draws_are_uniform():
    drawn = draw(np.arange(1, 40_001, dtype=np.uint64), seed=0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(np.histogram(drawn, bins=10)[0] - 4000).max() < 250


@given(st.integers(0, 5000))
def test_windows_cover_all_rows_in_order(rows):
    windows = list(open_windows(rows))
    assert [place for window in windows for place in window] == list(range(rows))
