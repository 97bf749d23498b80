"""Formats of datasets: chat messages, ShareGPT, prompt and completion, Alpaca, preference pairs, mapped rows.

Input: a parsed row that fits. Output: an interaction. In preference pairs the prompt is separate, or both
sides are conversations whose last turns differ (as text: paragraphs that begin with `Human:` and
`Assistant:`). A mapping gives dotted paths; a number in a path is a list index.
"""

import re
from collections.abc import Callable
from typing import Any

from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    name_type,
    open_json,
    say_status,
    says_error,
    take_extra,
    take_fact,
    take_facts,
    take_list,
    take_object,
    take_optional_text,
    take_stage,
    take_text,
    write_json,
)
from graftwork.data.ingest.turns import (
    ROLES,
    LogTurn,
    cut_after_reply,
    lead_by,
    open_system,
    require_user,
    take_message,
    take_prompt,
    take_turns,
    take_weight,
    to_exchange,
    to_messages,
    write_call,
    write_reply,
    write_result,
)
from graftwork.data.settings import Mapping
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.wording import take_score


def fits_chat(row: dict[str, Any]) -> bool:
    if row.get("messages") is not None or _has_contents(row):
        return True
    # A trajectory of an agent in the Agent Trajectory Interchange Format.
    return isinstance(row.get("steps"), list) and str(row.get("schema_version")).startswith("ATIF")


def read_chat(row: dict[str, Any], origin: Origin) -> Interaction:
    facts = take_facts(row, origin)
    tools = first_of(row, "tools", "functions")
    key = "messages" if row.get("messages") is not None else "contents" if _has_contents(row) else "steps"
    if key == "steps":
        turns = _take_steps(row["steps"])
        agent = take_object(row.get("agent"), "agent")
        facts["model"] = facts["model"] or take_fact(agent.get("model_name"))
        tools = tools or agent.get("tool_definitions")
    else:
        system = first_of(row, "system", "system_prompt", "systemInstruction", "system_instruction")
        turns = lead_by(open_system(system), take_turns(row[key], key))
    return Interaction(**to_exchange(turns, key, tools=tools), **facts)


def _has_contents(row: dict[str, Any]) -> bool:
    """Whether this is a row of Gemini's tuning files."""
    listed = open_json(row.get("contents"))
    return isinstance(listed, list) and bool(listed) and isinstance(listed[0], dict) and "parts" in listed[0]


def _take_steps(steps: list[Any]) -> list[LogTurn]:
    """Read the steps of a trajectory. Steps that no model wrote, or that are copied, are context."""
    turns: list[LogTurn] = []
    for index, item in enumerate(steps):
        key = f"steps[{index}]"
        step = take_object(item, key)
        source = step.get("source")
        if source not in ("system", "user", "agent"):
            raise BadRow(f"`{key}.source` must be one of system, user, agent")
        observation = take_object(step.get("observation"), f"{key}.observation")
        results = take_list(observation.get("results"), f"{key}.observation.results")
        if step.get("message") or step.get("tool_calls"):
            role = "assistant" if source == "agent" else source
            is_context = step.get("is_copied_context") is True or step.get("llm_call_count") == 0
            weight = {"weight": 0} if is_context else {}
            turns += take_message({**step, **weight, "role": role, "content": step.get("message") or ""}, key)
        for number, result in enumerate(results):
            name = f"{key}.observation.results[{number}]"
            content = take_object(result, name).get("content")
            if content is not None:
                turns.append(LogTurn("tool", write_result(content, f"{name}.content")))
    return turns


_WHOLE = frozenset(("messages", "conversations", "conversation", "request"))
"""Keys of a whole conversation, which no turn has."""


def fits_sharegpt(row: dict[str, Any]) -> bool:
    listed = first_of(row, "conversations", "conversation")
    first = listed[0] if isinstance(listed, list) and listed else None
    return listed is not None and (not isinstance(first, dict) or _WHOLE.isdisjoint(first))


def read_sharegpt(row: dict[str, Any], origin: Origin) -> Interaction:
    listed = open_json(first_of(row, "conversations", "conversation"))
    if not isinstance(listed, list) or not listed:
        raise BadRow(f"`conversations` must be a list of turns, not {name_type(listed)}")
    turns = [turn for n, item in enumerate(listed) for turn in _take_turn(item, f"conversations[{n}]")]
    turns = lead_by(first_of(row, "system", "system_prompt"), turns)
    exchange = to_exchange(turns, "conversations", tools=row.get("tools"))
    return Interaction(**exchange, **take_facts(row, origin))


def _take_turn(value: Any, key: str) -> list[LogTurn]:
    turn = take_object(value, key)
    if "from" not in turn:
        return take_message(turn, key)  # some hold messages under this name
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker.lower() not in ROLES:
        raise BadRow(f"`{key}.from` must be one of system, human, gpt, tool, function_call, observation")
    content = turn.get("value")
    if speaker.lower() == "function_call":
        opened, name = open_json(content), f"{key}.value"
        calls = []
        for item in opened if isinstance(opened, list) else [opened]:
            if isinstance(item, str):
                calls.append(f"<tool_call>\n{take_text(item, name)}\n</tool_call>")
            else:
                call = take_object(item, name)
                calls.append(write_call(call.get("name"), first_of(call, "arguments", "parameters"), name))
        return [LogTurn("assistant", "\n".join(calls))]
    role = ROLES[speaker.lower()]
    weight = take_weight(turn.get("weight")) if role == "assistant" else None
    return [LogTurn(role, take_text(content, f"{key}.value"), weight=weight)]


_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("prompt", "text"),
)


def fits_completion(row: dict[str, Any]) -> bool:
    return any(row.get(prompt_key) is not None and replied in row for prompt_key, replied in _PAIRS)


def read_completion(row: dict[str, Any], origin: Origin) -> Interaction:
    prompt_key, replied = next(pair for pair in _PAIRS if row.get(pair[0]) is not None and pair[1] in row)
    turns = take_prompt(row[prompt_key], prompt_key, system=first_of(row, "system", "system_prompt"))
    tools = first_of(row, "tools", "functions")
    reply = row[replied]
    if isinstance(reply, list) and reply and isinstance(reply[0], dict) and "role" in reply[0]:
        exchange = to_exchange([*turns, *take_turns(reply, replied)], replied, tools=tools)
        return Interaction(**exchange, **take_facts(row, origin))
    require_user(turns, prompt_key)
    reasoning = (
        take_optional_text(first_of(row, "reasoning_content", "reasoning", "thinking"), "reasoning") or ""
    )
    answer = LogTurn("assistant", "" if reply is None else take_text(reply, replied), reasoning)
    return Interaction(
        messages=to_messages(turns, tools=tools), reply=write_reply(answer), **take_facts(row, origin)
    )


def fits_alpaca(row: dict[str, Any]) -> bool:
    return row.get("instruction") is not None and ("output" in row or "response" in row)


def read_alpaca(row: dict[str, Any], origin: Origin) -> Interaction:
    key = "output" if "output" in row else "response"
    *system, prompt = take_prompt(
        row["instruction"], "instruction", system=first_of(row, "system", "system_prompt")
    )
    added = take_optional_text(row.get("input"), "input")
    question = LogTurn("user", f"{prompt.content}\n\n{added}") if added else prompt
    turns = system
    for index, pair in enumerate(take_list(open_json(row.get("history")), "history")):
        name = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"`{name}` must be a pair of question and answer")
        turns.append(LogTurn("user", take_text(pair[0], name)))
        turns.append(LogTurn("assistant", take_text(pair[1], name)))
    turns.append(question)
    return Interaction(
        messages=to_messages(turns, tools=row.get("tools")),
        reply="" if row.get(key) is None else take_text(row[key], key),
        **take_facts(row, origin),
    )


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def fits_preference(row: dict[str, Any]) -> bool:
    return any(row.get(won) is not None and row.get(lost) is not None for won, lost in _SIDES)


_SIDES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
"""The second as in OpenAI's preference files, whose `input` is a request."""


def read_preference(row: dict[str, Any], origin: Origin) -> Interaction:
    won, lost = next(pair for pair in _SIDES if row.get(pair[0]) is not None and row.get(pair[1]) is not None)
    preferred, rejected = _take_side(row[won], won), _take_side(row[lost], lost)
    request = open_json(row.get("input"))
    source = request if isinstance(request, dict) and won != "chosen" else row
    prompt = first_of(source, "prompt", "question", "instruction", "messages", "conversations")
    system = first_of(source, "system", "system_prompt")
    if len(preferred) > 1:
        if preferred[:-1] != rejected[:-1]:
            raise BadRow(f"`{won}` and `{lost}` do not answer the same conversation")
        turns = lead_by(system, preferred[:-1])
    elif prompt is not None:
        turns_before = _take_conversation(prompt, "prompt")
        turns = (
            take_prompt(prompt, "prompt", system=system)
            if turns_before is None
            else lead_by(system, turns_before)
        )
    else:
        raise BadRow(f"`prompt` is missing, and `{won}` holds only the reply")
    require_user(turns, "prompt")
    reply, lost_reply = write_reply(preferred[-1]), write_reply(rejected[-1])
    if reply == lost_reply:
        raise BadRow(f"`{won}` and `{lost}` are the same")
    messages = to_messages(turns, tools=first_of(source, "tools", "functions"))
    return Interaction(messages=messages, reply=reply, rejected=lost_reply, **take_facts(row, origin))


def _take_side(value: Any, key: str) -> list[LogTurn]:
    """Return the conversation of one side; its last turn is the reply."""
    turns = _take_conversation(value, key)
    if turns is None:
        text = take_text(value, key)
        before, *spoken = _SPEAKER.split(text)
        if before or len(spoken) < 4:
            turns = [LogTurn("assistant", text)]
        else:
            turns = [
                LogTurn("user" if speaker == "Human" else "assistant", content)
                for speaker, content in zip(spoken[::2], spoken[1::2], strict=True)
            ]
    return cut_after_reply(turns, key)


def _take_conversation(value: Any, key: str) -> list[LogTurn] | None:
    """Return the turns of one message or a list of them, as chat APIs or as ShareGPT; None for others."""
    opened = open_json(value)
    listed = opened if isinstance(opened, list) else [opened]
    if not listed or not isinstance(listed[0], dict) or listed[0].keys().isdisjoint(("role", "from")):
        return None
    return [turn for index, item in enumerate(listed) for turn in _take_turn(item, f"{key}[{index}]")]


def read_mapped(row: dict[str, Any], origin: Origin, *, mapping: Mapping) -> Interaction:
    system = follow(row, mapping.system) if mapping.system else None
    if mapping.question:
        prompt = follow(row, mapping.question)
        if prompt is None:
            raise BadRow(f"`{mapping.question}` is missing")
        turns = take_prompt(prompt, mapping.question, system=system)
    else:
        path = mapping.messages or ""
        turns = take_turns(follow(row, path), path)
        reply_indices = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if reply_indices and turns[reply_indices[-1]].content == follow(row, mapping.reply or ""):
            # The reply may be one of the messages itself, with thanks after it.
            turns = turns[: reply_indices[-1]]
        require_user(turns, path)
        turns = lead_by(system, turns, key=mapping.system or "")
    path = mapping.reply or ""
    replied = _walk(row, path)
    if replied is _NOWHERE:
        raise BadRow(f"`{path}` is missing")
    if replied is None:
        reply = ""  # a failed call has no reply; that is seen by its rule
    elif not isinstance(replied, dict):
        reply = take_text(replied, path)
    elif "role" in replied and "content" in replied:
        reply = write_reply(take_turns([replied], path)[-1])
    else:
        reply = write_json(replied, path)
    texts = (mapping.question, mapping.messages, mapping.reply, mapping.system)
    read = Interaction(
        id=str(origin),
        origin=origin,
        messages=to_messages(turns),
        reply=reply,
        status="failed" if says_error(row) else None,
        extra={key: value for key, value in take_extra(row).items() if key not in texts},
    )
    return take_mapped(read, row, mapping=mapping)


_MAPPED: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    *((name, name, take_fact) for name in ("id", "domain", "session", "finish_reason", "model", "split")),
    ("role", "group", take_fact),
    ("stage", "stage", take_stage),
    ("status", "status", say_status),
    ("reward", "reward", take_score),
)
"""The keys of a mapping that give a fact of an interaction, its name there, and how it is read."""


def take_mapped(read: Interaction, row: dict[str, Any], *, mapping: Mapping) -> Interaction:
    """Set the values that the mapping finds in the row; the others stay as they were read."""
    facts: dict[str, Any] = {}
    for key, name, take in _MAPPED:
        path = getattr(mapping, key)
        value = follow(row, path) if path else None
        fact = take(value)
        if fact is not None:
            facts[name] = fact
        elif key == "reward" and value not in (None, ""):
            raise BadRow(f"`{path}` {NO_SCORE}, and is {name_type(value)}")
    return read.model_copy(update=facts)


NO_SCORE = "must be a number for data.mapping.reward"


def follow(row: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    value = _walk(row, path)
    return None if value is _NOWHERE else value


_NOWHERE = object()


def _walk(row: Any, path: str) -> Any:
    """As `follow`, but None only where the log itself has a null along the path."""
    value = row
    parts = path.split(".")
    for depth, part in enumerate(parts):
        value = open_json(value)
        if isinstance(value, dict):
            dotted = ".".join(parts[depth:])
            if dotted in value:  # a key may have dots in it
                return value[dotted]
            value = value.get(part, _NOWHERE)
        elif isinstance(value, list) and part.removeprefix("-").isdecimal():
            number = int(part) if len(part) < 10 else len(value)
            value = value[number] if -len(value) <= number < len(value) else _NOWHERE
        else:
            return None if value is None else _NOWHERE
    return value
