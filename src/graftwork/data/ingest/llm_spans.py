"""Calls of language models from spans, by the conventions that libraries write.

Input: a span. Output: its interaction, or the rule that leaves it out. Reads OpenTelemetry's GenAI
conventions (messages on spans, message events, the older prompt and completion attributes), OpenInference,
and the attributes of Vercel's AI SDK, Langfuse and MLflow. Spans of agents, tools and chains repeat the texts
of their children: only calls of models become rows.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from graftwork.data.ingest.blocks import SkippedPart
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    name_type,
    open_json,
    rate_call,
    take_cost,
    take_count,
    take_fact,
    take_tokens,
    take_usage,
    write_json,
)
from graftwork.data.ingest.spans import Span, SpanEvent, to_nanoseconds, unflatten
from graftwork.data.ingest.turns import (
    FINISH_REASONS,
    ROLES,
    LogTurn,
    cut_after_reply,
    has_answer,
    is_item,
    require_user,
    take_answer,
    take_limit,
    take_message,
    take_question,
    take_spoken,
    take_tools,
    take_turns,
    to_messages,
    unwrap,
    write_reply,
)
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.tool_calls import define_tool
from graftwork.text.wording import take_figure

OTHER_SPAN = "other_span"
NO_CONTENT = "no_content"
NO_REPLY = "no_reply"
IN_OTHER_SPAN = "repeats_other_span"
INCOMPLETE = "incomplete"
"""The finish reason of a stream that broke off."""

_AI_SDK_CALLS = (".doGenerate", ".doStream")
_MODEL_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_MODEL_KINDS = ("generation", "llm", "chat_model", "completion")
_CALL_EVENT = "gen_ai.client.inference.operation.details"
_MESSAGE_EVENTS = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_SCORE_EVENT = "gen_ai.evaluation.result"
_FINISHED = {
    **FINISH_REASONS,
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "error": INCOMPLETE,
    "MAX_TOKENS": "length",
    "STOP": "stop",
}


class LeftOutCall(Exception):
    """The span is not a row, by this rule."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


class Bodies(NamedTuple):
    """What was asked and answered, the tools, and the facts of the response and of the request."""

    turns: list[LogTurn]
    reply: LogTurn | None
    tools: Any = None
    facts: dict[str, Any] = {}
    """They override those of the span."""
    asked: dict[str, Any] = {}
    """They are used where the span has none."""


def is_agent_call(span: Span) -> bool:
    """Whether this is the span of an agent, which some libraries put the messages of its calls on."""
    return span.attributes.get("gen_ai.operation.name") == "invoke_agent"


def is_model_call(span: Span) -> bool:
    facts = span.attributes
    kind = facts.get("openinference.span.kind")
    if kind is not None:
        return bool(kind == "LLM")
    ai_operation = facts.get("ai.operationId")
    if ai_operation is not None:
        # The span around these, such as `ai.generateText`, repeats their messages.
        return isinstance(ai_operation, str) and ai_operation.endswith(_AI_SDK_CALLS)
    operation = facts.get("gen_ai.operation.name") or facts.get("llm.request.type")
    if operation is not None:
        return isinstance(operation, str) and operation in _MODEL_OPERATIONS
    kind = open_text(facts.get("langfuse.observation.type") or facts.get("mlflow.spanType"))
    if kind is not None:
        return isinstance(kind, str) and kind.lower() in _MODEL_KINDS
    return "gen_ai.request.model" in facts or any(
        key.startswith(("gen_ai.prompt", "gen_ai.completion")) for key in facts
    )


def read_call(span: Span, origin: Origin, *, session: str | None = None) -> Interaction:
    """Read the span of a call of a model. Raises `LeftOutCall` where it is not a row."""
    # Where only MLflow's own attributes are, the search for all others is spared.
    readers = (_read_whole_bodies,) if _has_bodies_alone(span) else _READERS
    calls = (call for read in readers if (call := read(span)) is not None and call.turns)
    call = next(calls, None)
    if call is None:
        raise LeftOutCall(NO_CONTENT)
    require_user(call.turns, "the messages")
    reply = write_reply(call.reply) if call.reply is not None else ""
    if not reply and not span.failed:
        raise LeftOutCall(NO_REPLY)
    facts = _take_facts(span, origin)
    facts |= {key: value for key, value in call.facts.items() if value}
    facts |= {key: value for key, value in call.asked.items() if facts.get(key) is None}
    facts["session"] = facts["session"] or session
    reason = facts.pop("finish_reason", None)
    facts["finish_reason"] = _FINISHED.get(reason or "", reason)
    if span.failed:
        # Half an answer is truncated; without any the call failed.
        facts["finish_reason"] = INCOMPLETE if reply else facts["finish_reason"]
        facts["status"] = None if reply else "failed"
    return Interaction(messages=to_messages(call.turns, tools=call.tools), reply=reply, **facts)


def open_text(value: Any) -> Any:
    """Return the value of an attribute that some libraries write as JSON, text included."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return open_json(value)


def _has_bodies_alone(span: Span) -> bool:
    return not span.events and all(key.startswith("mlflow.") for key in span.attributes)


_CONVENTIONS: tuple[tuple[str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    ("group", take_fact, ("gen_ai.agent.name", "agent.name")),
    ("session", take_fact, ("gen_ai.conversation.id", "session.id", "langfuse.session.id", "thread.id")),
    (
        "model",
        take_fact,
        (
            *("gen_ai.response.model", "gen_ai.request.model", "llm.model_name"),
            *("langfuse.observation.model.name", "llm.response.model", "llm.request.model"),
            *("ai.response.model", "ai.model.id"),
        ),
    ),
    (
        "prompt_tokens",
        take_tokens,
        (
            *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
            *("ai.usage.inputTokens", "ai.usage.promptTokens"),
        ),
    ),
    (
        "reply_tokens",
        take_tokens,
        (
            *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
            *("ai.usage.outputTokens", "ai.usage.completionTokens"),
        ),
    ),
    (
        "cached_tokens",
        take_tokens,
        (
            *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
            *("llm.token_count.prompt_details.cache_read", "ai.usage.cachedInputTokens"),
        ),
    ),
)
"""Which attributes hold a fact of a row, in the order in which they count."""


def _take_facts(span: Span, origin: Origin) -> dict[str, Any]:
    facts = span.attributes
    usage = first_of(facts, "langfuse.observation.usage_details", "mlflow.chat.tokenUsage")
    cost = take_cost(first_of(facts, "gen_ai.usage.cost", "llm.cost.total"))
    if cost is None:
        details = open_json(first_of(facts, "langfuse.observation.cost_details", "mlflow.llm.cost"))
        cost = take_cost(details) or None if isinstance(details, dict) else None
    stated: dict[str, Any] = {}
    if not _has_bodies_alone(span):
        stated = {name: take(first_of(facts, *keys)) for name, take, keys in _CONVENTIONS}
        reasons = open_json(facts.get("gen_ai.response.finish_reasons"))
        reason = take_fact(reasons[0] if isinstance(reasons, list) and reasons else None)
        other_reason = take_fact(first_of(facts, "llm.finish_reason", "ai.response.finishReason"))
        parameters = first_of(facts, "llm.invocation_parameters", "langfuse.observation.model.parameters")
        stated["finish_reason"] = reason or other_reason
        stated["first_token_ms"] = _take_first_token(span)
        stated["max_tokens"] = take_count(facts.get("gen_ai.request.max_tokens")) or take_limit(
            open_json(parameters)
        )
        scores = [event.attributes for event in span.events if event.name == _SCORE_EVENT]
        stated |= rate_call(attributes.get("gen_ai.evaluation.score.value") for attributes in scores)
    extra: dict[str, Any] = {}
    if span.service and len(span.service) <= 200:
        extra["service"] = span.service
    if span.started is not None and 0 < span.started < 4e18:
        extra["timestamp"] = datetime.fromtimestamp(span.started / 1e9, UTC).isoformat()
    return {
        "id": span.id or str(origin),
        "origin": origin,
        "trace": span.trace or span.id or str(origin),
        "status": None,
        "session": None,
        "model": take_fact(open_text(facts.get("mlflow.llm.model"))),
        "duration_ms": span.duration_ms,
        "cost": cost,
        **{key: value for key, value in stated.items() if value is not None},
        **({} if usage is None else take_usage({"usage": open_json(usage)})),
        "extra": extra,
    }


def _take_first_token(span: Span) -> float | None:
    seconds = take_figure(
        first_of(span.attributes, "gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token")
    )
    if seconds is not None and seconds >= 0:
        return seconds * 1000
    began = to_nanoseconds(open_text(span.attributes.get("langfuse.observation.completion_start_time")))
    if began is None or span.started is None or began < span.started:
        return None
    return (began - span.started) / 1e6


def _read_genai(span: Span) -> Bodies | None:
    """Read the current conventions: messages with parts, on the span or on an event of it."""
    facts = span.attributes
    if "gen_ai.input.messages" not in facts:
        facts = next((e.attributes for e in span.events if e.name == _CALL_EVENT), {})
    if facts.get("gen_ai.input.messages") is None:
        return None
    turns = _take_part_messages(facts["gen_ai.input.messages"], "gen_ai.input.messages")
    instructions = facts.get("gen_ai.system_instructions")
    if instructions is not None:
        [system] = take_message({"role": "system", "parts": instructions}, "gen_ai.system_instructions")
        if system.content and (not turns or turns[0].role != "system"):
            turns.insert(0, LogTurn("system", system.content))
    outputs = open_json(facts.get("gen_ai.output.messages") or [])
    replies = _take_part_messages(outputs, "gen_ai.output.messages")
    reply = next((turn for turn in replies if turn.role == "assistant"), None)
    first = outputs[0] if isinstance(outputs, list) and outputs else None
    stated = first.get("finish_reason") if isinstance(first, dict) else None
    tools = take_tool_definitions(facts.get("gen_ai.tool.definitions"))
    return Bodies(turns, reply, tools, {"finish_reason": take_fact(stated)})


def take_tool_definitions(value: Any) -> list[dict[str, Any]]:
    """Return tools in OpenAI's nested form, from that or from the flat form."""
    listed = open_json(value)
    tools = []
    for item in listed if isinstance(listed, list) else ():
        tool = open_json(item)
        if isinstance(tool, dict):
            tools.append(define_tool(tool))
    return tools


def _take_part_messages(value: Any, key: str) -> list[LogTurn]:
    listed = open_json(value)
    if not isinstance(listed, list):
        raise BadRow(f"`{key}` must be a list of messages, not {name_type(listed)}")
    turns: list[LogTurn] = []
    for index, item in enumerate(listed):
        message = item if type(item) is dict else open_json(item)
        plain = _take_plain(message) if type(message) is dict else None
        if plain is not None:
            turns.append(plain)
            continue
        is_open = isinstance(message, dict) and "parts" in message
        turns += take_message({"role": "assistant", **message} if is_open else message, f"{key}[{index}]")
    return turns


def _take_plain(message: dict[str, Any]) -> LogTurn | None:
    """Read a message of one text, as nearly all are: spares the search for calls and reasoning."""
    parts, role_name = message.get("parts"), message.get("role", "assistant")
    role = ROLES.get(role_name) if type(role_name) is str else None
    if type(parts) is not list or len(parts) != 1 or role is None or type(parts[0]) is not dict:
        return None
    part = parts[0]
    content = part.get("content")
    if part.get("type") != "text" or type(content) is not str or "\0" in content or role == "tool":
        return None
    return LogTurn(role, content)


def _read_openinference(span: Span) -> Bodies | None:
    messages = _take_numbered(span.attributes, "llm.input_messages")
    if not messages:
        return None
    replies = _take_numbered(span.attributes, "llm.output_messages")
    turns = take_turns(messages, "llm.input_messages")
    reply = None
    if replies:
        [reply] = take_message({**replies[0], "role": "assistant"}, "llm.output_messages.0")
    tools = []
    if any(key.startswith("llm.tools.0.tool.json_schema") for key in span.attributes):
        schemas = [item.get("tool") for item in unflatten(span.attributes, "llm.tools")]
        tools = [open_json(item.get("json_schema")) for item in schemas if isinstance(item, dict)]
    body = open_json(span.attributes.get("output.value"))
    choices = body.get("choices") if isinstance(body, dict) else None
    finished = {}
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        # A stream that broke off has no reason.
        finished = {"finish_reason": take_fact(choices[0].get("finish_reason")) or INCOMPLETE}
    return Bodies(turns, reply, tools, finished)


def _read_ai_sdk(span: Span) -> Bodies | None:
    """Read the attributes of Vercel's AI SDK."""
    facts = span.attributes
    prompt = open_json(first_of(facts, "ai.prompt.messages", "ai.prompt"))
    if prompt is None:
        return None
    turns = take_question(prompt) if isinstance(prompt, dict) else _take_prompt(prompt)
    content = first_of(facts, "ai.response.text", "ai.response.object", "ai.result.text", "ai.result.object")
    calls = open_json(first_of(facts, "ai.response.toolCalls", "ai.result.toolCalls"))
    reply = None
    if content is not None or calls:
        text = content if isinstance(content, str | None) else write_json(content, "ai.response.object")
        message = {"content": text or "", "toolCalls": calls, "reasoning": facts.get("ai.response.reasoning")}
        [reply] = take_message({"role": "assistant", **message}, "ai.response")
    return Bodies(turns, reply, take_tool_definitions(facts.get("ai.prompt.tools")))


def _take_numbered(attributes: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return the messages under numbered keys; those with only role and content by a shorter path."""
    start = f"{prefix}."
    by_number: dict[str, dict[str, Any]] = {}
    for key, value in attributes.items():
        if not key.startswith(start):
            continue
        number, _, name = key[len(start) :].partition(".")
        if name not in ("message.role", "message.content") or not number.isdecimal() or len(number) > 9:
            return [_to_message(item) for item in unflatten(attributes, prefix)]
        by_number.setdefault(number, {"role": "assistant"})[name[8:]] = value
    return [by_number[number] for number in sorted(by_number, key=int)]


def _to_message(item: dict[str, Any]) -> dict[str, Any]:
    """Return a message of OpenInference as chat APIs write it."""
    inner = item.get("message")
    message = dict(inner) if isinstance(inner, dict) else {}
    parts = message.pop("contents", None)
    if isinstance(parts, list) and message.get("content") is None:
        values = [part.get("message_content") for part in parts if isinstance(part, dict)]
        message["content"] = [part for part in values if isinstance(part, dict)]
    calls = message.pop("tool_calls", None)
    if isinstance(calls, list):
        values = [call.get("tool_call") for call in calls if isinstance(call, dict)]
        message["tool_calls"] = [call for call in values if isinstance(call, dict)]
    if "function_call_name" in message:
        message["function_call"] = {
            "name": message.pop("function_call_name"),
            "arguments": message.pop("function_call_arguments_json", None),
        }
    message.setdefault("role", "assistant")
    return message


def _read_message_events(span: Span) -> Bodies | None:
    """Read one event per message, as the conventions had it up to version 1.36."""
    turns: list[LogTurn] = []
    reply: LogTurn | None = None
    reason = None
    for event in span.events:
        role = _MESSAGE_EVENTS.get(event.name)
        content = _open_event(event)
        if role is not None:
            turns += take_message({"role": role, **content}, event.name)
        elif event.name == "gen_ai.choice" and reply is None:
            inner = open_json(content.get("message"))
            message = (
                inner if isinstance(inner, dict) else {"content": first_of(content, "message", "content")}
            )
            tool_calls = first_of(message, "tool_calls") or content.get("tool_calls")
            body = {"content": message.get("content"), "tool_calls": tool_calls}
            [reply] = take_message({"role": "assistant", **body}, event.name)
            reason = take_fact(content.get("finish_reason"))
        elif event.name == "gen_ai.content.prompt":
            turns += _take_prompt(event.attributes.get("gen_ai.prompt"))
        elif event.name == "gen_ai.content.completion":
            turns += _take_prompt(event.attributes.get("gen_ai.completion"), role="assistant")
    if turns and reply is None and turns[-1].role == "assistant":
        reply = turns.pop()
    return Bodies(turns, reply, None, {"finish_reason": reason}) if turns else None


def _open_event(event: SpanEvent) -> dict[str, Any]:
    """Return the content of a message event: its body, or its attributes."""
    body = (
        event.body
        if isinstance(event.body, dict)
        else open_json(event.attributes.get("gen_ai.event.content"))
    )
    fields = body if isinstance(body, dict) else event.attributes
    return {key: value for key, value in fields.items() if key != "role" or isinstance(value, str)}


def _take_prompt(value: Any, *, role: str = "user") -> list[LogTurn]:
    opened = open_json(value)
    if isinstance(opened, list):
        return take_turns(opened, "gen_ai.prompt") if opened else []
    if isinstance(opened, dict) and "role" in opened:
        return take_message(opened, "gen_ai.prompt")
    return take_message({"role": role, "content": value}, "gen_ai.prompt") if value else []


def _read_numbered(span: Span) -> Bodies | None:
    """Read `gen_ai.prompt.0.content` and similar, as OpenLLMetry writes them."""
    prompts = unflatten(span.attributes, "gen_ai.prompt") or unflatten(span.attributes, "llm.prompts")
    if not prompts:
        return None
    replies = unflatten(span.attributes, "gen_ai.completion") or unflatten(span.attributes, "llm.completions")
    turns: list[LogTurn] = []
    for index, item in enumerate(prompts):
        turns += take_message({"role": "user", **item}, f"gen_ai.prompt.{index}")
    reply = None
    reason = None
    if replies:
        reason = take_fact(replies[0].get("finish_reason"))
        [reply] = take_message({**replies[0], "role": "assistant"}, "gen_ai.completion.0")
    tools = take_tool_definitions(unflatten(span.attributes, "llm.request.functions"))
    return Bodies(turns, reply, tools, {"finish_reason": reason})


_BODIES = (
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
    ("input.value", "output.value"),
    ("gen_ai.prompt", "gen_ai.completion"),
    ("traceloop.entity.input", "traceloop.entity.output"),
)


def _read_whole_bodies(span: Span) -> Bodies | None:
    """Read whole requests and responses: Langfuse, MLflow, and the plain values of OpenInference."""
    facts = span.attributes
    names = next((names for names in _BODIES if facts.get(names[0]) is not None), None)
    return None if names is None else read_bodies(facts[names[0]], facts.get(names[1]))


_READERS = (
    _read_genai,
    _read_openinference,
    _read_ai_sdk,
    _read_message_events,
    _read_numbered,
    _read_whole_bodies,
)
"""The conventions, the most exact first."""


def to_row(
    bodies: Bodies, origin: Origin, facts: dict[str, Any], *, failed: bool, key: str, tools: Any = None
) -> Interaction | SkippedPart:
    """Return the row of a call that a tool kept as request and response, or the rule that leaves it out.

    `facts` precede those of the response; None is not stated. `tools` are used where the request has none.
    """
    if not bodies.turns or (bodies.reply is None and not failed):
        return SkippedPart(origin=origin, rule=NO_REPLY if bodies.turns else NO_CONTENT, count=1)
    require_user(bodies.turns, key)
    reply = write_reply(bodies.reply) if bodies.reply else ""
    stated = {
        **{name: value for name, value in bodies.facts.items() if value is not None},
        **{name: value for name, value in facts.items() if value is not None},
    }
    stated["finish_reason"] = INCOMPLETE if failed and reply else bodies.facts.get("finish_reason")
    return Interaction(
        origin=origin,
        messages=to_messages(bodies.turns, tools=bodies.tools or tools),
        reply=reply,
        status="failed" if failed and not reply else None,
        **stated,
    )


def read_bodies(asked: Any, answered: Any) -> Bodies:
    """Read what a tool kept as input and output of a call: bodies of an API, messages, or text."""
    request = open_text(asked)
    tools = None
    if request is None or request in ("", [], {}):
        return Bodies([], None)
    if isinstance(request, dict) and (request.keys() & {"messages", "input", "prompt", "contents"}):
        turns = take_question(request)
        tools = take_tools(request)
    elif isinstance(request, list) and take_spoken(request) is None and _are_texts(request):
        turns = take_message({"role": "user", "content": "\n\n".join(request)}, "the input")
    elif isinstance(request, list):
        turns = take_turns(request, "the input")
    elif isinstance(request, dict) and "role" in request:
        turns = take_message(request, "the input")
    else:
        text = write_json(request, "the input") if isinstance(request, dict) else request
        turns = take_message({"role": "user", "content": text}, "the input")
    reply, facts = read_output(open_text(answered))
    listed = request.get("messages") if isinstance(request, dict) else request
    if reply and isinstance(listed, list) and _are_texts(listed):
        [spoken] = take_spoken([reply.content]) or [reply]
        reply = spoken if spoken.role == "assistant" else reply
    if reply is None and turns and turns[-1].role == "assistant":
        *turns, reply = cut_after_reply(turns, "the input")
    body = request if isinstance(request, dict) else {}
    return Bodies(
        turns, reply, tools, facts, {"model": take_fact(body.get("model")), "max_tokens": take_limit(body)}
    )


def _are_texts(listed: list[Any]) -> bool:
    return all(isinstance(open_json(item), str) for item in listed)


def read_output(answered: Any) -> tuple[LogTurn | None, dict[str, Any]]:
    """Read a response body, a message, a list of messages, or text; with the facts of the response."""
    if answered is None or answered in ("", {}, []):
        return None, {}
    if isinstance(answered, list) and any(is_item(item) for item in answered):
        answered = {"output": answered, "status": "completed"}
    elif isinstance(answered, list):
        last = open_json(answered[-1])
        answered = last if isinstance(last, dict) else {"content": last}
    elif not isinstance(answered, dict):
        answered = {"content": answered}
    body = unwrap(answered, "the output")
    if has_answer(body):
        answer = take_answer(body)
        states_end = body.get("choices") is not None or isinstance(body.get("output"), list)
        reason = answer.finish_reason or (INCOMPLETE if states_end else None)
        return answer.turn, {
            **take_usage(body),
            "model": take_fact(body.get("model")),
            "finish_reason": reason,
        }
    if body.keys() & {"role", "content", "tool_calls", "toolCalls", "parts"}:
        return take_message({**body, "role": "assistant"}, "the output")[0], {}
    return LogTurn("assistant", write_json(body, "the output")), {}
