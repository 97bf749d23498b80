"""Exports of agent sessions: one row is a session, and a session holds several exchanges.

The accepted shape; every key may be missing but one of the lists, and the whole may stand under
`session`:

    session_id | id         the session
    agent | role | manager, domain, stage, model, status        as in other logs
    exchanges | interactions | episodes
                            a list of rows of any single shape: messages, prompt and completion …
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

Each exchange, decision and pattern becomes an interaction of its own, with the id of the session
and its number. What a reviewer rejected has the status `rejected`, whatever the session says of
itself; of several verdicts the last one stands. The reward is the signal called total, overall,
final or reward, else the mean of all; one that stands at the exchange goes before that of the
session.
"""

from collections.abc import Callable
from typing import Any

from graftwork.data.formats.alpaca import fits_alpaca, read_alpaca
from graftwork.data.formats.chat import fits_chat, read_chat
from graftwork.data.formats.completion import fits_completion, read_completion
from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import (
    BadRow,
    first_of,
    open_json,
    take_fact,
    take_figure,
    take_list,
    take_object,
    take_optional_text,
    take_text,
)
from graftwork.data.formats.openai_log import fits_openai_log, read_openai_log
from graftwork.data.formats.sharegpt import fits_sharegpt, read_sharegpt
from graftwork.data.formats.turns import Turn, write_reply
from graftwork.records.interaction import Interaction, Message, Origin

SESSION_EXPECTS = "a session with decisions, code_patterns or exchanges"
_EXCHANGES = ("exchanges", "interactions", "episodes")
_DECISIONS = ("decisions",)
_PATTERNS = ("code_patterns", "patterns")
_LISTS = frozenset((*_EXCHANGES, *_DECISIONS, *_PATTERNS))
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
    held = session if isinstance(session, dict) and not _has_list(row) else row
    return _has_list(held)


def read_session(row: dict[str, Any], origin: Origin) -> list[Interaction]:
    inner = row.get("session")
    if isinstance(inner, dict) and not _has_list(row):
        row = {**{key: value for key, value in row.items() if key != "session"}, **inner}
    facts = _take_session_facts(row, origin)
    found: list[Interaction] = []
    for keys, read in _READERS:
        name = next((key for key in keys if row.get(key) is not None), keys[0])
        for place, item in enumerate(take_list(open_json(row.get(name)), name)):
            key = f"{name}[{place}]"
            try:
                found.append(_own(read(take_object(open_json(item), key), origin, key), item, facts))
            except BadRow as error:
                raise BadRow(str(error) if key in str(error) else f"in `{key}`: {error}") from None
    if row.get("messages") is not None:
        found.append(_own(read_chat(row, origin), {}, facts))
    if not found:
        raise BadRow("the session holds no exchange")
    base = facts["id"]
    return [row.model_copy(update={"id": f"{base}#{number}"}) for number, row in enumerate(found, start=1)]


def _has_list(row: dict[str, Any]) -> bool:
    return any(isinstance(open_json(row[key]), list) for key in _LISTS & row.keys())


def _take_session_facts(row: dict[str, Any], origin: Origin) -> dict[str, Any]:
    facts = take_facts({key: value for key, value in row.items() if key not in _REWARDS}, origin)
    session = take_fact(first_of(row, "session_id", "id"))
    facts["session"] = facts["session"] or session
    facts["id"] = take_fact(row.get("id")) or facts["session"] or str(origin)
    facts["group"] = facts["group"] or take_fact(row.get("manager"))
    facts["reward"] = _take_rewards(row)
    facts["status"] = _take_verdict(row) or facts["status"]
    return facts


def _own(found: Interaction, item: dict[str, Any], session: dict[str, Any]) -> Interaction:
    """An exchange with what it states of itself, and else what its session states."""
    own = {
        key: getattr(found, key) if getattr(found, key) is not None else session[key]
        for key in ("group", "domain", "stage", "model", "status", "split", "duration_ms", "max_tokens")
    }
    reward = _take_rewards(item)
    verdict = _take_verdict(item)
    if session["status"] == "rejected" and verdict is None:
        verdict = "rejected"
    return found.model_copy(
        update={
            **own,
            "session": session["session"],
            "reward": session["reward"] if reward is None else reward,
            "status": verdict or own["status"],
            "extra": {**session["extra"], **found.extra},
        }
    )


def _read_exchange(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    read = next((read for fits, read in _SINGLE if fits(item)), None)
    if read is None:
        raise BadRow(f"`{key}` must hold messages, or prompt and completion")
    return read({name: value for name, value in item.items() if name not in _REWARDS}, origin)


def _read_decision(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    asked = take_text(first_of(item, *_SITUATION), f"{key}.situation")
    decided = take_text(first_of(item, *_DECISION), f"{key}.decision")
    reasoning = take_optional_text(first_of(item, "reasoning", "rationale"), f"{key}.reasoning") or ""
    return _make(origin, asked, write_reply(Turn("assistant", decided, reasoning)), kind="decision")


def _read_pattern(item: dict[str, Any], origin: Origin, key: str) -> Interaction:
    task = take_text(first_of(item, *_TASK), f"{key}.task")
    code = take_text(first_of(item, *_CODE), f"{key}.code")
    language = take_fact(item.get("language"))
    fenced = f"```{language}\n{code}\n```" if language and "```" not in code else code
    return _make(origin, task, fenced, kind="code_pattern")


def _make(origin: Origin, asked: str, reply: str, *, kind: str) -> Interaction:
    messages = (Message(role="user", content=asked),)
    return Interaction(id=str(origin), origin=origin, messages=messages, reply=reply, extra={"kind": kind})


def _take_rewards(row: dict[str, Any]) -> float | None:
    name = next((key for key in _REWARDS if row.get(key) is not None), None)
    if name is None:
        return None
    value = open_json(row[name])
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict)]
        value = {str(item.get("name", place)): item.get("value") for place, item in enumerate(named)} or {
            str(place): item for place, item in enumerate(value)
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
    """The status that the last verdict of a reviewer gives, if there is one."""
    given = open_json(first_of(row, *_FEEDBACK))
    verdict: str | None = None
    for item in given if isinstance(given, list) else [given]:
        if not isinstance(item, dict):
            continue  # a bare comment is no verdict
        said = first_of(item, "approved", "verdict", "decision", "outcome")
        word = said.strip().lower().replace(" ", "_") if isinstance(said, str) else said
        if word is False or word in _REJECTED:
            verdict = "rejected"
        elif word is True or word in _APPROVED:
            verdict = "success"
    return verdict


_READERS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any], Origin, str], Interaction]], ...] = (
    (_EXCHANGES, _read_exchange),
    (_DECISIONS, _read_decision),
    (_PATTERNS, _read_pattern),
)
