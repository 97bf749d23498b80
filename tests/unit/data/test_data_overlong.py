"""Whatever the rule, every row that comes out fits, and no text in it was altered."""

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graftwork.data.render.rows import fit_row
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Message

ROLES = ["system", "user", "assistant", "tool"]
TEXTS = st.text("abc ", max_size=12)
TALKS = st.lists(st.builds(Message, role=st.sampled_from(ROLES), content=TEXTS), max_size=14)
LEAST = 8
RULES = st.sampled_from(["drop", "truncate", "split_by_turn"])


def count(messages, reply):
    return sum(len(message.content) + 2 for message in messages) + len(reply) + 1


def talk(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(role=roles[turn[0]], content=turn[2:]) for turn in turns)


def fit_talk(messages, reply, rule, most):
    return fit_row(messages, reply, count=count, settings=DataSettings(max_tokens=most, overlong=rule))


def draw_too_few(data, messages, reply):
    """A limit that the row goes beyond: drawn below its length, for most drawn blindly would be above it."""
    length = count(messages, reply)
    assume(length > LEAST)
    return data.draw(st.integers(LEAST, length - 1))


def is_part_in_order(part, whole):
    left = iter(whole)
    return all(any(turn is other for other in left) for turn in part)


@given(TALKS, TEXTS, RULES, st.integers(8, 120))
@settings(max_examples=200, deadline=None)
def test_every_row_fits_in_order_with_no_text_altered(messages, reply, rule, most):
    rows, reason = fit_talk(messages, reply, rule, most)
    texts = {message.content for message in messages if message.role == "assistant"} | {reply}
    for row in rows:
        assert count(*row) <= most
        assert is_part_in_order(row.messages, messages)
        assert row.reply in texts
    if count(messages, reply) <= most:
        assert rows == [(tuple(messages), reply)]
        assert not reason
    else:
        assert reason
        assert rule != "drop" or not rows


@given(TALKS, TEXTS, st.data())
@settings(max_examples=200, deadline=None)
def test_truncating_keeps_reply_question_and_system_and_as_much_as_fits(messages, reply, data):
    most = draw_too_few(data, messages, reply)
    questions = [at for at, message in enumerate(messages) if message.role == "user"]

    def end(begin):
        return tuple(m for at, m in enumerate(messages) if at >= begin or m.role == "system")

    rows, reason = fit_talk(messages, reply, "truncate", most)
    fitting = [end(at) for at in questions if count(end(at), reply) <= most]
    assert rows == ([(fitting[0], reply)] if fitting else [])
    assert reason
    for kept, kept_reply in rows:
        assert kept_reply == reply
        assert next(m.role for m in kept if m.role != "system") == "user"
        assert [m for m in kept if m.role == "system"] == [m for m in messages if m.role == "system"]
        # A result of a tool never stands without the turn before it.
        for before, turn in pairwise(messages):
            if turn.role == "tool" and before.role != "system" and any(turn is m for m in kept):
                assert any(before is m for m in kept)


@given(TALKS, TEXTS, st.data())
@settings(max_examples=200, deadline=None)
def test_splitting_makes_a_row_of_every_answer_that_fits_with_its_question(messages, reply, data):
    most = draw_too_few(data, messages, reply)
    turns = [*messages, Message(role="assistant", content=reply)]
    wanted = []
    for at, turn in enumerate(turns):
        questions = [n for n in range(at) if turns[n].role == "user"]
        if turn.role != "assistant" or not turn.content.strip() or not questions:
            continue
        alone = [m for n, m in enumerate(turns[:at]) if n >= questions[-1] or m.role == "system"]
        if count(alone, turn.content) <= most:
            wanted.append(turn.content)
    assert [row.reply for row in fit_talk(messages, reply, "split_by_turn", most)[0]] == wanted


def test_the_oldest_turns_are_left_out_with_their_tools():
    messages = talk("s:be kind", "u:one", "a:call", "t:result", "a:done", "u:two", "a:yes", "u:three")
    most = count(messages, "reply") - 1
    [row], reason = fit_talk(messages, "reply", "truncate", most)
    assert row == (talk("s:be kind", "u:two", "a:yes", "u:three"), "reply")
    assert "4 of its turns left out" in reason


def test_a_question_that_does_not_fit_with_its_reply_is_refused_with_the_reason():
    rows, reason = fit_talk(talk("u:hello", "a:hi", f"u:{'x' * 40}"), "reply", "truncate", 20)
    assert rows == []
    assert "last question and reply alone" in reason
    rows, reason = fit_talk(talk(f"u:{'x' * 40}"), "reply", "split_by_turn", 20)
    assert rows == []
    assert "none of its turns fits" in reason


def test_answers_lost_in_splitting_are_counted():
    rows, reason = fit_talk(talk("u:hello", f"a:{'x' * 40}", "u:and now"), "reply", "split_by_turn", 20)
    assert [row.reply for row in rows] == ["reply"]
    assert "1 of its 2 answers; 1 too long" in reason


def test_a_long_conversation_is_not_counted_whole_for_each_of_its_turns():
    counted = 0

    def count_and_note(messages, reply):
        nonlocal counted
        counted += len(messages)
        return count(messages, reply)

    messages = talk(*(turn for n in range(500) for turn in (f"u:{n:04}", f"a:{n:04}")), "u:last")
    rows, _ = fit_row(
        messages,
        "reply",
        count=count_and_note,
        settings=DataSettings(max_tokens=100, overlong="split_by_turn"),
    )
    assert len(rows) == 501
    # Whole for each would be half a million turns.
    assert counted < 150_000
