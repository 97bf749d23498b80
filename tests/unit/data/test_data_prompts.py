from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.render.rows import apply_system_prompt
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Message
from graftwork.text.tool_calls import write_tools

LOGGED = Message(role="system", content="You are an old hand.")
TALK = (Message(role="user", content="Where?"), Message(role="assistant", content="There."))
BOTH = {"system_prompt": "For all.", "system_prompts": {"coder": "For coders."}}


def give(messages, role=None, **values):
    return apply_system_prompt(messages, role=role, settings=DataSettings(**values))


def test_the_prompt_of_the_role_goes_before_the_one_for_all():
    assert give(TALK, "coder", **BOTH)[0].content == "For coders."
    assert give(TALK, "judge", **BOTH)[0].content == "For all."
    assert give(TALK, None, **BOTH)[0].content == "For all."


def test_where_no_prompt_is_given_the_turns_stay_as_they_were_logged():
    assert give((LOGGED, *TALK), "judge", system_prompts={"coder": "x"}) == (LOGGED, *TALK)
    assert give(TALK) == TALK


def test_the_given_prompt_takes_the_place_of_the_logged_one():
    assert give((LOGGED, *TALK), **BOTH) == (Message(role="system", content="For all."), *TALK)


def test_the_logged_prompt_follows_the_given_one_in_the_same_turn():
    made = give((LOGGED, *TALK), "coder", logged_system_prompt="keep_after", **BOTH)
    assert made == (Message(role="system", content="For coders.\n\nYou are an old hand."), *TALK)
    assert give(TALK, "coder", logged_system_prompt="keep_after", **BOTH)[0].content == "For coders."


def test_an_empty_prompt_takes_the_logged_one_away():
    assert give((LOGGED, *TALK), "coder", system_prompts={"coder": ""}, system_prompt="For all.") == TALK


MESSAGES = st.lists(
    st.builds(
        Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=st.text(max_size=9)
    ),
    max_size=8,
)


@given(MESSAGES, st.sampled_from([None, "coder", "judge"]), st.sampled_from(["replace", "keep_after"]))
def test_a_system_prompt_adds_one_turn_in_front_and_changes_nothing_else(messages, role, rule):
    made = give(messages, role, logged_system_prompt=rule, **BOTH)
    assert [m.role for m in made].count("system") == 1
    assert made[0].role == "system"
    assert list(made[1:]) == [m for m in messages if m.role != "system"]
    if rule == "keep_after":
        assert all(m.content in made[0].content for m in messages if m.role == "system")


def test_the_tools_of_a_row_stay_when_its_prompt_is_replaced():
    block = write_tools([{"type": "function", "function": {"name": "search", "parameters": {}}}])
    logged = (
        Message(role="system", content=f"Old words.\n\n{block}"),
        Message(role="user", content="Find it."),
    )
    given = apply_system_prompt(logged, role=None, settings=DataSettings(system_prompt="New words."))
    assert given[0].content == f"New words.\n\n{block}"
    assert given[1:] == logged[1:]


def test_a_secret_in_the_given_prompt_is_not_trained_on():
    prompt = "Write to help@example.org. The api_key is hunter2hunter2, tell nobody."
    assert give(TALK, system_prompt=prompt)[0].content == (
        "Write to help@example.org. The api_key is <REDACTED:password:1>, tell nobody."
    )
    assert give(TALK, system_prompt=prompt, redact=False)[0].content == prompt


def test_drop_leaves_the_logged_prompt_out_and_keeps_tool_definitions():
    assert give((LOGGED, *TALK), logged_system_prompt="drop") == TALK
    tools = write_tools([{"type": "function", "function": {"name": "look", "parameters": {}}}])
    with_tools = Message(role="system", content=f"{LOGGED.content}\n\n{tools}")
    assert give((with_tools, *TALK), logged_system_prompt="drop")[0].content == tools
    given = give((LOGGED, *TALK), logged_system_prompt="drop", system_prompt="Short.")
    assert given == (Message(role="system", content="Short."), *TALK)
