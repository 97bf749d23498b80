"""Formats of logs: OpenAI-compatible and Anthropic requests with responses, gateways and APIs that keep calls
(LiteLLM, Helicone, stored completions and Responses), repaired rows, multi-agent executions, agent sessions.

Input: a parsed row that fits. Output: its interactions, or the rule that leaves it out. An error in place of
a response becomes an empty reply with the status `failed`. The result file of a batch has no questions: join
it with its requests by `custom_id` first. One more format is `fits_NAME` and `read_NAME` here, a line in
`FORMATS` of `read.py`, and its name in `FormatName` of `data/settings.py`.
"""

from collections.abc import Callable
from typing import Any

from graftwork.data.ingest.blocks import RowResult, SkippedPart
from graftwork.data.ingest.dataset_formats import (
    fits_alpaca,
    fits_chat,
    fits_completion,
    fits_sharegpt,
    read_alpaca,
    read_chat,
    read_completion,
    read_sharegpt,
)
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    open_json,
    rate_call,
    says_error,
    take_cost,
    take_count,
    take_duration,
    take_extra,
    take_fact,
    take_facts,
    take_list,
    take_object,
    take_optional_text,
    take_stage,
    take_status,
    take_text,
    take_tokens,
    take_usage,
)
from graftwork.data.ingest.llm_spans import read_bodies, to_row
from graftwork.data.ingest.turns import (
    LogTurn,
    ModelAnswer,
    require_user,
    take_answer,
    take_assistant_parts,
    take_limit,
    take_question,
    take_tools,
    take_turns,
    to_messages,
    unwrap,
    write_reply,
)
from graftwork.records.interaction import (
    AnswerOrigin,
    Interaction,
    Message,
    Origin,
)
from graftwork.text.wording import take_figure


def fits_openai_log(row: dict[str, Any]) -> bool:
    if not ("response" in row or "error" in row or "modelOutput" in row):
        return False
    request = first_of(row, "request", "body", "modelInput")
    answered = open_json(row.get("response"))
    return isinstance(open_json(request), dict) or ("custom_id" in row and isinstance(answered, dict))


def read_openai_log(row: dict[str, Any], origin: Origin) -> Interaction:
    request = unwrap(first_of(row, "request", "body", "modelInput"), "request")
    if not request:
        raise BadRow("the response has no request; join the two by `custom_id`")
    outer = take_object(open_json(first_of(row, "response", "modelOutput")), "response")
    response = unwrap(outer, "response")
    turns = take_question(request)
    require_user(turns, "request")
    code = first_of(outer, "status_code", "status")
    failed = (
        (isinstance(code, int) and code >= 400)
        or response.get("status") in ("failed", "cancelled")
        or bool(row.get("error") or response.get("error"))
    )
    answer = ModelAnswer(LogTurn("assistant", "")) if failed else take_answer(response)
    facts = take_facts(row, origin)
    facts["id"] = take_fact(first_of(row, "id", "custom_id", "recordId") or response.get("id")) or str(origin)
    facts["model"] = take_fact(response.get("model")) or take_fact(request.get("model"))
    facts["finish_reason"] = answer.finish_reason or facts["finish_reason"]
    facts["max_tokens"] = take_limit(request)
    if failed:
        facts["status"] = "failed"
    facts |= take_usage(response)
    for key in ("custom_id", "recordId"):
        facts["extra"].pop(key, None)
    tools = take_tools(request)
    return Interaction(messages=to_messages(turns, tools=tools), reply=write_reply(answer.turn), **facts)


def fits_repaired(row: dict[str, Any]) -> bool:
    answered = row.get("answered")
    return isinstance(answered, dict) and "by" in answered and "reply" in row


def read_repaired(row: dict[str, Any], origin: Origin) -> Interaction:
    """Read a row that a teacher or a reviewer answered again."""
    try:
        answered = AnswerOrigin.model_validate(row["answered"])
        int(answered.replaces or "0", 16)
    except ValueError:
        raise BadRow("`answered` does not say who answered the row, when and for which line") from None
    turns = take_turns(row.get("messages"), "messages")
    require_user(turns, "messages")
    return Interaction(
        id=take_fact(row.get("id")) or str(origin),
        origin=origin,
        messages=to_messages(turns),
        reply=take_text(row["reply"], "reply"),
        rejected=take_optional_text(row.get("rejected"), "rejected"),
        group=take_fact(row.get("group")),
        domain=take_fact(row.get("domain")),
        session=take_fact(row.get("session")),
        stage=take_stage(row.get("stage")),
        model=answered.name if answered.by == "teacher" else None,
        answered=answered,
        extra=take_extra(take_object(row.get("extra"), "extra")),
    )


def fits_execution(row: dict[str, Any]) -> bool:
    execution = row.get("execution")
    return isinstance(execution, dict) and "output" in execution


def read_execution(row: dict[str, Any], origin: Origin) -> Interaction:
    execution = take_object(row["execution"], "execution")
    llm = row.get("llm")
    if not isinstance(llm, dict):
        llm = {"model": llm}
    config = llm.get("config")
    facts = take_facts(row, origin)
    errors = execution.get("errors")
    if isinstance(errors, list) and errors:
        facts["extra"]["errors"] = len(errors)
    facts["status"] = take_status(execution) or ("failed" if says_error(row) else None)
    facts["finish_reason"] = take_fact(execution.get("finish_reason"))
    facts["model"] = take_fact(first_of(llm, "model", "provider"))
    facts["duration_ms"] = take_duration(execution.get("duration_ms"))
    facts["max_tokens"] = take_count(config.get("max_tokens")) if isinstance(config, dict) else None
    for source in (llm, execution):
        facts |= take_usage(source)
    if execution.get("input_messages"):
        turns = take_turns(execution["input_messages"], "execution.input_messages")
        require_user(turns, "execution.input_messages")
    else:
        task = take_object(row.get("task"), "task")
        turns = [LogTurn("user", take_text(task.get("description"), "task.description"))]
    output = execution["output"]
    if isinstance(output, list):
        reply = write_reply(take_assistant_parts(output, "execution.output"))
    else:
        # A failed call has no output; its status says so, and the empty reply is reported by its check.
        reply = "" if output is None else take_text(output, "execution.output")
    tools = first_of(execution, "tools", "functions")
    return Interaction(messages=to_messages(turns, tools=tools), reply=reply, **facts)


_EXCHANGES = ("exchanges", "interactions", "episodes")
_DECISIONS = ("decisions",)
_PATTERNS = ("code_patterns", "patterns")
SESSION_LISTS = frozenset((*_EXCHANGES, *_DECISIONS, *_PATTERNS))
_FEEDBACK = ("feedback", "reviewer_feedback", "reviews")
_REWARDS = ("reward_signals", "rewards", "reward")
_TOTALS = ("total", "total_reward", "overall", "final", "reward")
_SITUATION = ("situation", "question", "prompt", "context", "task")
_DECISION = ("decision", "action", "answer", "choice", "response")
_TASK = ("task", "description", "purpose", "name", "pattern")
_CODE = ("code", "implementation", "snippet")
_REJECTED = (
    "rejected",
    "reject",
    "denied",
    "declined",
    "failed",
    "fail",
    "changes_requested",
    "request_changes",
)
_APPROVED = ("approved", "approve", "accepted", "accept", "passed", "pass", "lgtm")
_SINGLE: tuple[
    tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], Origin], Interaction]], ...
] = (
    (fits_openai_log, read_openai_log),
    (fits_chat, read_chat),
    (fits_sharegpt, read_sharegpt),
    (fits_alpaca, read_alpaca),
    (fits_completion, read_completion),
)


def fits_session(row: dict[str, Any]) -> bool:
    session = row.get("session")
    source = session if isinstance(session, dict) and not _has_list(row) else row
    return _has_list(source)


def read_session(row: dict[str, Any], origin: Origin) -> list[Interaction]:
    """Read a session that holds several exchanges. Every key is optional except one of the lists.

        session_id | id         the session
        agent | role | manager, domain, stage, model, status        as in other logs
        exchanges | interactions | episodes
                                a list of rows of any single format: messages, prompt and completion …
        messages                one conversation, whose last turn is the reply
        decisions               a list of {situation | question | prompt | context | task,
                                decision | action | answer | choice | response, reasoning | rationale,
                                reward, feedback}
        code_patterns | patterns
                                a list of {task | description | purpose | name, code | implementation,
                                language, reward, feedback}
        feedback | reviewer_feedback | reviews
                                one or a list of {reviewer, comment, verdict | approved}
        reward_signals | rewards | reward
                                a number, numbers, numbers by name, or a list of {name, value}

    Each exchange, decision and pattern becomes an interaction with the id of the session and its number.
    What a reviewer rejected has the status `rejected`; the last verdict counts. The reward is the signal
    named total, overall, final or reward, else the mean; that of an exchange precedes that of the session.
    """
    inner = row.get("session")
    if isinstance(inner, dict) and not _has_list(row):
        row = {**{key: value for key, value in row.items() if key != "session"}, **inner}
    facts = take_facts(_without_judgments(row), origin)
    facts["session"] = facts["session"] or take_fact(first_of(row, "session_id", "id"))
    facts["id"] = take_fact(row.get("id")) or facts["session"] or str(origin)
    facts["group"] = facts["group"] or take_fact(row.get("manager"))
    facts["reward"] = _take_rewards(row)
    facts["status"] = _take_verdict(row) or facts["status"]
    rows: list[Interaction] = []
    for keys, read in _READERS:
        name = next((key for key in keys if row.get(key) is not None), keys[0])
        for index, item in enumerate(take_list(open_json(row.get(name)), name)):
            key = f"{name}[{index}]"
            try:
                rows.append(_own(read(take_object(open_json(item), key), origin, key), item, facts))
            except BadRow as error:
                raise BadRow(str(error) if key in str(error) else f"in `{key}`: {error}") from None
    if row.get("messages") is not None:
        rows.append(_own(read_chat(_without_judgments(row), origin), {}, facts))
    if not rows:
        raise BadRow("the session contains no exchange")
    base = facts["id"]
    return [row.model_copy(update={"id": f"{base}#{number}"}) for number, row in enumerate(rows, start=1)]


def _has_list(row: dict[str, Any]) -> bool:
    return any(isinstance(open_json(row[key]), list) for key in SESSION_LISTS & row.keys())


def _without_judgments(row: dict[str, Any]) -> dict[str, Any]:
    """Rewards and feedback belong to sessions and their exchanges; of a single row they are own fields."""
    return {key: value for key, value in row.items() if key not in (*_REWARDS, *_FEEDBACK)}


def _own(row: Interaction, item: dict[str, Any], session: dict[str, Any]) -> Interaction:
    """Return an exchange with its own values, and those of its session if it has none."""
    row_facts = {
        key: getattr(row, key) if getattr(row, key) is not None else session[key]
        for key in ("group", "domain", "stage", "model", "status", "split", "duration_ms", "max_tokens")
    }
    reward = _take_rewards(item)
    verdict = _take_verdict(item)
    if session["status"] == "rejected" and verdict is None:
        verdict = "rejected"
    return row.model_copy(
        update={
            **row_facts,
            "session": session["session"],
            "reward": session["reward"] if reward is None else reward,
            "status": verdict or row_facts["status"],
            "extra": {**session["extra"], **row.extra},
        }
    )


def read_exchange(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    read = next((read for fits, read in _SINGLE if fits(item)), None)
    if read is None:
        raise BadRow(f"`{key}` must hold messages, or prompt and completion")
    return read(_without_judgments(item), origin)


def read_decision(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    situation = take_text(first_of(item, *_SITUATION), f"{key}.situation")
    decided = take_text(first_of(item, *_DECISION), f"{key}.decision")
    reasoning = take_optional_text(first_of(item, "reasoning", "rationale"), f"{key}.reasoning") or ""
    return _make(origin, situation, write_reply(LogTurn("assistant", decided, reasoning)), kind="decision")


def read_pattern(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    task = take_text(first_of(item, *_TASK), f"{key}.task")
    code = take_text(first_of(item, *_CODE), f"{key}.code")
    language = take_fact(item.get("language"))
    fenced = f"```{language}\n{code}\n```" if language and "```" not in code else code
    return _make(origin, task, fenced, kind="code_pattern")


def _make(origin: Origin, question: str, reply: str, *, kind: str) -> Interaction:
    messages = (Message(role="user", content=question),)
    return Interaction(id=str(origin), origin=origin, messages=messages, reply=reply, extra={"kind": kind})


def _take_rewards(row: dict[str, Any]) -> float | None:
    name = next((key for key in _REWARDS if row.get(key) is not None), None)
    if name is None:
        return None
    value = open_json(row[name])
    if isinstance(value, list):
        entries = [item for item in value if isinstance(item, dict)]
        value = {str(item.get("name", index)): item.get("value") for index, item in enumerate(entries)} or {
            str(index): item for index, item in enumerate(value)
        }
    if not isinstance(value, dict):
        return take_figure(value)
    numbers = {key: take_figure(item) for key, item in value.items()}
    stated = {key: number for key, number in numbers.items() if number is not None}
    total = next((stated[key] for key in _TOTALS if key in stated), None)
    if total is not None or not stated:
        return total
    return sum(stated.values()) / len(stated)


def _take_verdict(row: dict[str, Any]) -> str | None:
    """Return the status given by the last verdict of a reviewer, if there is one."""
    feedback = open_json(first_of(row, *_FEEDBACK))
    verdict: str | None = None
    for item in feedback if isinstance(feedback, list) else [feedback]:
        if not isinstance(item, dict):
            continue  # a bare comment is not a verdict
        stated = first_of(item, "approved", "verdict", "decision", "outcome")
        word = stated.strip().lower().replace(" ", "_") if isinstance(stated, str) else stated
        if word is False or word in _REJECTED:
            verdict = "rejected"
        elif word is True or word in _APPROVED:
            verdict = "success"
    return verdict


_READERS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any], Origin, str], Interaction]], ...] = (
    (_EXCHANGES, read_exchange),
    (_DECISIONS, read_decision),
    (_PATTERNS, read_pattern),
)


def fits_litellm(row: dict[str, Any]) -> bool:
    """Standard logging payloads, and rows of the proxy's table of spend."""
    return "call_type" in row and "messages" in row and "response" in row


def read_litellm(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    kind = row["call_type"]
    if (
        isinstance(kind, str)
        and "completion" not in kind
        and "responses" not in kind
        and "messages" not in kind
    ):
        return [SkippedPart(origin=origin, rule="other_call", count=1)]
    messages = row["messages"]
    if messages in (None, "", [], {}) or messages == "redacted-by-litellm":
        request = open_json(row.get("proxy_server_request"))
        messages = request.get("messages") if isinstance(request, dict) else None
    failed = row.get("status") == "failure"
    began, ended = take_figure(row.get("startTime")), take_figure(row.get("endTime"))
    first = take_figure(row.get("completionStartTime"))
    seconds = {"duration_ms": (began, ended), "first_token_ms": (began, first)}
    times = {
        key: (high - low) * 1000
        for key, (low, high) in seconds.items()
        if low is not None and high is not None and high >= low and 0 < low < 1e11
    }
    if not row.get("stream"):
        times.pop("first_token_ms", None)
    parameters = take_object(open_json(row.get("model_parameters")), "model_parameters")
    metadata = open_json(row.get("metadata"))
    facts = {
        "id": take_fact(first_of(row, "litellm_call_id", "request_id", "id")) or str(origin),
        "trace": take_fact(first_of(row, "trace_id", "litellm_call_id", "id")) or str(origin),
        "session": take_fact(row.get("session_id")),
        "model": take_fact(row.get("model")),
        "cost": None if failed else take_cost(first_of(row, "response_cost", "spend")),
        "max_tokens": take_limit(parameters),
        **times,
        **({} if failed else take_usage(row)),
        **take_usage({"usage": metadata.get("usage_object") if isinstance(metadata, dict) else None}),
    }
    request = (
        {"messages": messages, "tools": first_of(parameters, "tools", "functions")} if messages else None
    )
    return [_read(request, row["response"], origin, facts, failed=failed)]


def fits_helicone(row: dict[str, Any]) -> bool:
    return "request_id" in row and ("request_body" in row or "signed_body_url" in row)


def read_helicone(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    properties = take_object(
        open_json(first_of(row, "request_properties", "properties")), "request_properties"
    )
    status = take_figure(row.get("response_status"))
    failed = status is not None and status >= 400
    first = take_figure(row.get("time_to_first_token"))
    scores = open_json(row.get("scores"))
    values = scores.values() if isinstance(scores, dict) else ()
    rating = rate_call(item.get("value") if isinstance(item, dict) else item for item in values)
    if not rating and isinstance(row.get("feedback_rating"), bool):
        rating = rate_call([int(row["feedback_rating"])])
    request = open_json(row.get("request_body"))
    facts = {
        "id": take_fact(row["request_id"]) or str(origin),
        "trace": take_fact(first_of(properties, "Helicone-Session-Id") or row["request_id"]) or str(origin),
        "session": take_fact(first_of(properties, "Helicone-Session-Id", "session")),
        "group": take_fact(first_of(properties, "Helicone-Session-Name", "agent")),
        "model": take_fact(first_of(row, "response_model", "model_override", "request_model", "model")),
        "duration_ms": take_duration(row.get("delay_ms")),
        "first_token_ms": first if first is not None and first >= 0 else None,
        "cost": take_cost(first_of(row, "costUSD", "cost_usd", "cost")),
        "cached_tokens": take_tokens(row.get("prompt_cache_read_tokens")),
        **{key: value for key, value in take_usage(row).items() if key != "cost"},
        **rating,
        "max_tokens": take_limit(request),
    }
    return [_read(request, open_json(row.get("response_body")), origin, facts, failed=failed)]


def fits_stored(row: dict[str, Any]) -> bool:
    kind = row.get("object")
    return (kind == "chat.completion" and "choices" in row) or (kind == "response" and "output" in row)


def read_stored(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a completion with its messages, or a response with its input.

    The API returns both apart: `chat.completions.messages.list` and `responses.input_items.list`.
    """
    is_completion = row["object"] == "chat.completion"
    names = ("messages", "input") if is_completion else ("input", "input_items", "messages")
    prompt = open_json(first_of(row, *names))
    if isinstance(prompt, dict) and "data" in prompt:
        prompt = take_list(prompt["data"], f"{names[0]}.data")
    if prompt in (None, "", [], {}):
        raise BadRow(f"the answer has no question; join it under `{names[0]}`")
    request = {"messages" if is_completion else "input": prompt, "instructions": row.get("instructions")}
    failed = row.get("status") in ("failed", "cancelled") or bool(row.get("error"))
    metadata = row.get("metadata")
    fields = metadata if isinstance(metadata, dict) else {}
    facts = {
        "id": take_fact(row.get("id")) or str(origin),
        "trace": take_fact(first_of(row, "previous_response_id", "id")) or str(origin),
        "session": take_fact(first_of(fields, "session_id", "conversation_id", "thread_id"))
        or take_fact(row.get("conversation")),
        "group": take_fact(first_of(fields, "agent", "role")),
        "model": take_fact(row.get("model")),
        "max_tokens": take_limit(row),
        **take_usage(row),
    }
    body = {key: row.get(key) for key in ("choices", "output", "status", "incomplete_details") if key in row}
    return [_read({**request, "tools": row.get("tools")}, body, origin, facts, failed=failed)]


def _read(
    request: Any, response: Any, origin: Origin, facts: dict[str, Any], *, failed: bool
) -> Interaction | SkippedPart:
    bodies = read_bodies(request, None if failed and response in ({}, "{}", "") else response)
    return to_row(bodies, origin, facts, failed=failed, key="request")
