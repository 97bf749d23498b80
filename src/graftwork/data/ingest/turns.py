"""Turns of a conversation as text, with tool calls and reasoning in the tags that models are trained on.

Input: a list of messages as common APIs log them, with the content parts of Gemini, Bedrock, OpenTelemetry,
Vercel's AI SDK or pydantic-ai, or items of the Responses API. Output: turns whose `content` is what the model
saw or wrote. Tool calls are in <tool_call> tags, tool definitions in a `# Tools` block of the system turn
(both as in Qwen's template), the reply's reasoning in <think> tags before the answer. Reasoning of earlier
turns is left out, as models are served without it.

Bodies of requests and responses of OpenAI-compatible and Anthropic APIs, however a log wraps them, are read
into the turns that were asked, and the answer with its finish reason. Raises `BadRow` that names the key.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    name_type,
    open_json,
    take_count,
    take_fact,
    take_list,
    take_object,
    take_optional_text,
    take_text,
    write_json,
)
from graftwork.records.interaction import Message, Role
from graftwork.text import tool_calls
from graftwork.text.tool_calls import ToolCall

_KINDS = {
    **dict.fromkeys(("tool_call", "tool_use", "toolUse", "functionCall", "function_call"), "tool_use"),
    **dict.fromkeys(
        (
            *("tool_call_response", "tool_response", "tool_return", "tool_result", "retry_prompt"),
            *("toolResult", "functionResponse", "function_response"),
        ),
        "tool_result",
    ),
    **dict.fromkeys(("thinking", "reasoningContent"), "reasoning"),
}


def open_parts(content: list[Any]) -> list[Any]:
    """Return the parts of a message under the names that chat APIs give them."""
    return [part for part in map(_open_part, content) if part is not None]


def _open_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    stated = first_of(part, "type", "part_kind")
    content: Any = part
    if stated == "compaction":
        text = first_of(part, "content", "text")
        return None if text is None else {"type": "text", "text": text}
    if isinstance(stated, str):
        kind = _KINDS.get(stated.replace("-", "_"))
    elif part.get("thought") is True:
        kind = "reasoning"
    else:  # Gemini and Bedrock name the kind of a part by a key
        key = next((key for key in _KINDS if isinstance(part.get(key), dict)), "")
        kind, content = _KINDS.get(key), part.get(key)
    if kind == "tool_use":
        name = first_of(content, "name", "toolName", "tool_name")
        return {"type": kind, "name": name, "input": first_of(content, "input", "arguments", "args")}
    if kind == "tool_result":
        result = first_of(content, "content", "response", "result", "output")
        if isinstance(result, list) and len(result) == 1 and isinstance(result[0], dict):
            [only] = result  # a list of one that states its type
            result = next(iter(only.values())) if only.keys() in ({"json"}, {"text"}) else result
        elif isinstance(result, dict) and result.keys() == {"type", "value"}:
            result = result["value"]
        return {"type": kind, "content": result}
    if kind == "reasoning" and "type" not in part:
        inner = content.get("reasoningText")
        text = first_of(inner if isinstance(inner, dict) else content, "text", "content")
        return {"type": kind, "text": text or ""}
    return part


def open_message(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return a message or item without a role as messages with one; None if it is of no known kind."""
    kind, author = value.get("type"), value.get("kind")
    parts = open_json(value.get("parts"))
    if kind in ("function_call", "custom_tool_call"):
        arguments = value.get("arguments") if kind == "function_call" else {"input": value.get("input")}
        return [_reply([{"type": "tool_use", "name": value.get("name"), "input": arguments}])]
    if kind in ("function_call_output", "custom_tool_call_output"):
        return [{"role": "tool", "content": value.get("output")}]
    if kind == "reasoning":
        return [_reply([value])]
    if isinstance(parts, list) and author in ("request", "response"):
        return [_reply(parts)] if author == "response" else [_open_request(part) for part in parts]
    # Gemini does not require the role of a user.
    return [{"role": "user", "parts": parts}] if isinstance(parts, list) and author is None else None


def is_item(value: Any) -> bool:
    """Whether this is an item of the Responses API that belongs to what the model wrote at once."""
    return isinstance(value, dict) and "role" not in value and value.get("type") in _ITEMS


_ITEMS = ("function_call", "custom_tool_call", "reasoning", "function_call_output", "custom_tool_call_output")


def _reply(parts: list[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": parts}


_REQUEST_ROLES = {"system-prompt": "system", "user-prompt": "user", "tool-return": "tool"}


def _open_request(part: Any) -> dict[str, Any]:
    """Return the message of one part of a pydantic-ai request: each part has its own role."""
    fields = part if isinstance(part, dict) else {}
    kind = fields.get("part_kind")
    if kind == "retry-prompt":
        kind = "tool-return" if fields.get("tool_name") else "user-prompt"
    return {"role": _REQUEST_ROLES.get(str(kind)), "content": fields.get("content")}


ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REASONING_PARTS = ("reasoning", "thinking", "redacted_thinking")
_SPOKEN = re.compile(r"\s*(\w{2,20}): +(.*)", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


class LogTurn(NamedTuple):
    """`weight` is what the log states for an assistant turn: 0 is not trained on."""

    role: Role
    content: str
    reasoning: str = ""
    weight: float | None = None


def take_turns(value: Any, key: str) -> list[LogTurn]:
    """Read a list of messages with `role` and `content`."""
    value = open_json(value)
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{key}` must be a list of messages, not {name_type(value)}")
    spoken = take_spoken(value)
    if spoken is not None:
        return spoken
    turns: list[LogTurn] = []
    has_items = False
    for index, item in enumerate(value):
        message = item if type(item) is dict else open_json(item)
        turns += take_message(message, f"{key}[{index}]")
        has_items = has_items or ("role" not in message and is_item(message))
    turns = _join_items(turns) if has_items else turns
    # Each request of pydantic-ai repeats the instructions.
    text = value[0].get("instructions") if isinstance(value[0], dict) else None
    is_led = bool(turns) and turns[0].role == "system"
    return [LogTurn("system", text), *turns] if isinstance(text, str) and text and not is_led else turns


def take_spoken(texts: list[Any]) -> list[LogTurn] | None:
    """Read messages that a library wrote as text after their role, as in `user: Where?`; None for others."""
    matches = [_SPOKEN.fullmatch(text) for text in texts if isinstance(text, str)]
    if len(matches) < len(texts) or not all(
        match and match[1].lower() in ROLES and "\0" not in match[2] for match in matches
    ):
        return None
    return [LogTurn(ROLES[match[1].lower()], match[2]) for match in matches if match]


def take_message(value: Any, key: str) -> list[LogTurn]:
    """Read one message; tool results in a user's message become turns of their own."""
    if not isinstance(value, dict):
        raise BadRow(f"`{key}` must be an object with role and content, not {name_type(value)}")
    role = value.get("role")
    if role is None and (opened := open_message(value)) is not None:
        return [turn for message in opened for turn in take_message(message, key)]
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRow(f"`{key}.role` must be one of system, user, assistant, tool")
    speaker = ROLES[role.lower()]
    content = value.get("content")
    if type(content) is str and len(value) == 2 and "\0" not in content:
        return [LogTurn(speaker, content)]  # as nearly all are: spares the search for calls and reasoning
    if content is None and "parts" in value:
        content = open_json(value["parts"])
    if speaker == "assistant":
        return [_take_assistant({**value, "content": content}, key)]
    if isinstance(content, list):
        content = open_parts(content)
    parts = content if isinstance(content, list) else []
    results = [part for part in parts if _is_result(part)]
    turns = [LogTurn("tool", write_result(part.get("content"), f"{key}.content")) for part in results]
    message_parts = [part for part in parts if not _is_result(part)] if results else content
    if results and not message_parts:
        return turns
    text = write_result if speaker == "tool" else take_text
    return [*turns, LogTurn(speaker, text(message_parts, f"{key}.content"))]


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


def _join_items(turns: list[LogTurn]) -> list[LogTurn]:
    """Join what the model wrote in a row: the Responses API lists reasoning, text and calls one by one."""
    joined: list[LogTurn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "assistant":
            content, reasoning = (
                "\n".join(filter(None, texts))
                for texts in ((joined[-1].content, turn.content), (joined[-1].reasoning, turn.reasoning))
            )
            joined[-1] = joined[-1]._replace(content=content, reasoning=reasoning)
        else:
            joined.append(turn)
    return [turn for turn in joined if turn.content or turn.role != "assistant"]


def require_user(messages: Iterable[Message | LogTurn], key: str) -> None:
    if not any(message.role == "user" for message in messages):
        raise BadRow(f"`{key}` holds no turn of the user")


def to_messages(turns: Iterable[LogTurn], *, tools: Any = None) -> tuple[Message, ...]:
    """Return the messages as the model sees them: without reasoning, with the tools it may call."""
    messages = [
        Message(role=role, content=drop_reasoning(content) if role == "assistant" else content)
        for role, content, *_ in turns
    ]
    if tools is None:
        return tuple(messages)
    opened = open_json(tools)
    listed = map(open_json, opened if isinstance(opened, list) else [opened])
    # The bare name of a tool is not a definition.
    defined = [tool for item in listed if isinstance(item, dict) and item for tool in _open_tools(item)]
    try:
        return tool_calls.add_tools(messages, [tool for tool in defined if isinstance(tool, dict)])
    except (RecursionError, ValueError):
        raise BadRow("`tools` is nested too deeply") from None


def to_exchange(turns: list[LogTurn], key: str, *, tools: Any = None) -> dict[str, Any]:
    """Split off the assistant's last turn as the reply; turns after it, such as thanks, are dropped.

    A turn with the weight 0 is context, and never the reply. Returns `messages`, `reply` and, where they are
    stated, `turn_weights` of an `Interaction`.
    """
    *before, last = cut_after_reply(turns, key)
    require_user(before, key)
    weights = tuple(turn.weight for turn in (*before, last) if turn.role == "assistant")
    return {
        "messages": to_messages(before, tools=tools),
        "reply": write_reply(last),
        "turn_weights": weights if any(weight is not None for weight in weights) else None,
    }


def cut_after_reply(turns: list[LogTurn], key: str) -> list[LogTurn]:
    """Return the turns up to the assistant's last one that does not have the weight 0."""
    end = len(turns)
    while end and (turns[end - 1].role != "assistant" or turns[end - 1].weight == 0):
        end -= 1
    if end:
        return turns[:end]
    if any(turn.role == "assistant" for turn in turns):
        raise BadRow(f"every reply in `{key}` has weight zero: nothing is left to train on")
    raise BadRow(f"the last of `{key}` must be the assistant's reply, and there is none")


def take_weight(value: Any) -> float | None:
    """Read the weight of an assistant turn: 0 or 1 as in OpenAI's format; None for what is not a number."""
    return None if not isinstance(value, bool | int | float) else float(value > 0)


def write_reply(turn: LogTurn) -> str:
    """Return a reply with its reasoning before it."""
    if not turn.reasoning or turn.content.lstrip().startswith("<think>"):
        return turn.content
    return f"<think>\n{turn.reasoning}\n</think>\n\n{turn.content}"


def drop_reasoning(reply: str) -> str:
    """Remove the reasoning before a reply. Reasoning that was cut off stays: it is a fault to report."""
    thought = _THOUGHT.match(reply) if "<think>" in reply else None
    return reply[thought.end() :] if thought else reply


def write_call(name: Any, arguments: Any, key: str) -> str:
    """Write a tool call; arguments that were logged as text are parsed."""
    opened = {} if arguments is None else open_json(arguments)
    call = ToolCall(take_text(name, f"{key}.name"), opened)
    try:
        return tool_calls.write_call(call)
    except (RecursionError, ValueError):
        raise BadRow(f"`{key}` is nested too deeply") from None


def write_result(content: Any, key: str) -> str:
    """Write the result of a tool: text, text parts, or any JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return take_text(content, key)
    is_parts = isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content)
    return take_text(content, key) if is_parts else write_json(content, key)


def _open_tools(tool: dict[str, Any]) -> list[Any]:
    """Return a definition as it is, those that Gemini lists under one, or the one that Bedrock wraps."""
    declared = first_of(tool, "functionDeclarations", "function_declarations")
    if isinstance(declared, list):
        return declared
    spec = tool.get("toolSpec")
    if not isinstance(spec, dict):
        return [tool]
    schema = spec.get("inputSchema")
    return [{**spec, "inputSchema": schema.get("json", schema)} if isinstance(schema, dict) else spec]


def take_assistant_parts(content: Any, key: str) -> LogTurn:
    """Read the content parts of an assistant: text, reasoning and tool calls in order."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[str] = []
    for index, part in enumerate(open_parts(content)):
        kind = part.get("type") if isinstance(part, dict) else None
        name = f"{key}[{index}]"
        if kind in _REASONING_PARTS:
            thoughts.append(_take_reasoning(part, name))
        elif kind == "tool_use":
            calls.append(write_call(part.get("name"), part.get("input"), name))
        else:
            try:
                texts.append(take_text([part], name))
            except BadRow as error:
                # The part has an index of its own.
                raise BadRow(str(error).replace(f"{name}[0]", name)) from None
    return LogTurn("assistant", _join("".join(texts), calls), "\n".join(filter(None, thoughts)))


def _take_assistant(value: dict[str, Any], key: str) -> LogTurn:
    content = value.get("content")
    calls = _take_calls(value, key)
    if isinstance(content, list):
        turn = take_assistant_parts(content, f"{key}.content")
    elif content is None and (calls or value.get("refusal")):
        turn = LogTurn("assistant", take_optional_text(value.get("refusal"), f"{key}.refusal") or "")
    else:
        turn = LogTurn("assistant", take_text(content, f"{key}.content"))
    reasoning = turn.reasoning or _take_reasoning(value, key)
    text = _join(turn.content, calls)
    return LogTurn("assistant", text, reasoning.strip("\n"), take_weight(value.get("weight")))


def _take_calls(value: dict[str, Any], key: str) -> list[str]:
    listed = take_list(open_json(first_of(value, "tool_calls", "toolCalls")), f"{key}.tool_calls")
    calls = []
    for index, item in enumerate(listed):
        name = f"{key}.tool_calls[{index}]"
        call = take_object(item, name)
        function = take_object(call["function"], f"{name}.function") if "function" in call else call
        called = first_of(function, "name", "function_name", "toolName")
        calls.append(write_call(called, first_of(function, "arguments", "args", "input"), name))
    if value.get("function_call") is not None:
        call = take_object(value["function_call"], f"{key}.function_call")
        calls.append(write_call(call.get("name"), call.get("arguments"), f"{key}.function_call"))
    return calls


def _take_reasoning(value: dict[str, Any], key: str) -> str:
    """Return reasoning by any of its names; encrypted reasoning has none."""
    is_part = value.get("type") in _REASONING_PARTS
    for name in (*_REASONING_KEYS, *(("text", "summary", "content") if is_part else ())):
        reasoning = value.get(name)
        if isinstance(reasoning, str) and reasoning:
            return take_text(reasoning, f"{key}.{name}")
        if isinstance(reasoning, list) and reasoning:
            texts = [
                part if isinstance(part, str) else take_object(part, f"{key}.{name}") for part in reasoning
            ]
            return "\n".join(
                text if isinstance(text, str) else take_text(text.get("text"), f"{key}.{name}")
                for text in texts
            )
    return ""


def _join(text: str, calls: list[str]) -> str:
    return "\n".join([text, *calls] if text else calls)


def take_prompt(value: Any, key: str, *, system: Any = None) -> list[LogTurn]:
    """Return what was asked: non-empty text, or the turns so far, after the system prompt."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        turns = take_turns(value, key)
    else:
        text = take_text(value, key)
        if not text.strip():
            raise BadRow(f"`{key}` is empty")
        turns = [LogTurn("user", text)]
    return lead_by(system, turns)


def open_system(system: Any) -> Any:
    """Return the system prompt; Gemini's is a message."""
    return open_json(system.get("parts")) if isinstance(system, dict) else system


def lead_by(system: Any, turns: list[LogTurn], *, key: str = "system") -> list[LogTurn]:
    """Insert the system prompt of a row before its turns, unless they begin with one."""
    text = take_optional_text(system, key)
    return [LogTurn("system", text), *turns] if text and turns and turns[0].role != "system" else turns


FINISH_REASONS = {
    **{"max_output_tokens": "length", "max_tokens": "length", "end_turn": "stop"},
    **{"MAX_TOKENS": "length", "STOP": "stop", "tool-calls": "tool_calls"},
}
_PROMPTS = ("prompt", "inputText")
_TEXTS = ("generation", "completion", "outputText", "text")
"""Where models of Bedrock put plain text."""


class ModelAnswer(NamedTuple):
    turn: LogTurn
    finish_reason: str | None = None


def unwrap(value: Any, key: str) -> dict[str, Any]:
    """Return the body of a request or response, however the log wraps it."""
    opened = take_object(open_json(value), key)
    inner = open_json(first_of(opened, "body", "json"))
    return inner if isinstance(inner, dict) else opened


def take_limit(parameters: Any) -> int | None:
    """Return the most tokens that a request asks for."""
    if not isinstance(parameters, dict):
        return None
    return take_count(first_of(parameters, "max_completion_tokens", "max_output_tokens", "max_tokens"))


def take_question(request: dict[str, Any]) -> list[LogTurn]:
    config = request.get("config")
    fields = {**config, **request} if isinstance(config, dict) else request
    system = open_system(
        first_of(fields, "instructions", "system", "systemInstruction", "system_instruction")
    )
    for name in ("messages", "input", "contents"):
        prompt = request.get(name)
        if prompt is None:
            continue
        listed = [prompt] if isinstance(prompt, dict) else open_json(prompt)
        if not isinstance(listed, list):
            return take_prompt(prompt, f"request.{name}", system=system)
        if name == "contents":
            listed = [{"parts": [{"text": item}]} if isinstance(item, str) else item for item in listed]
        return lead_by(system, take_turns(listed, f"request.{name}"), key="request.system")
    return take_prompt(first_of(request, *_PROMPTS), "request.prompt", system=system)


def take_tools(request: dict[str, Any]) -> Any:
    """Return the tools of a request, wherever an API lists them."""
    for source in (request, request.get("config"), request.get("toolConfig")):
        tools = first_of(source, "tools", "functions") if isinstance(source, dict) else None
        if tools is not None:
            return tools
    return None


def has_answer(response: dict[str, Any]) -> bool:
    """Whether this is the body of a response of a chat API."""
    output, candidates = response.get("output"), response.get("candidates")
    return (
        response.get("choices") is not None
        or isinstance(output, list)
        or isinstance(candidates, list)
        or (isinstance(output, dict) and "message" in output)
        or (isinstance(response.get("content"), list) and "stop_reason" in response)
    )


def take_answer(response: dict[str, Any]) -> ModelAnswer:
    if response.get("choices") is not None:
        return _take_choice(response["choices"])
    output, content = response.get("output"), response.get("content")
    reason = take_fact(first_of(response, "stop_reason", "stopReason", "finishReason", "completionReason"))
    if response.get("candidates") is not None:  # Gemini
        candidates = take_list(response["candidates"], "response.candidates")
        first = take_object(candidates[0] if candidates else None, "response.candidates[0]")
        reason = take_fact(first.get("finishReason"))
        message = {"parts": [], **take_object(first.get("content"), "response.candidates[0].content")}
        [turn] = take_message({**message, "role": "assistant"}, "response.candidates[0].content")
    elif isinstance(output, dict):  # Bedrock's Converse
        message = take_object(output.get("message"), "response.output.message")
        [turn] = take_message({**message, "role": "assistant"}, "response.output.message")
    elif output is not None:
        return _take_output(response)
    elif isinstance(content, list):
        turn = take_assistant_parts(content, "response.content")
    else:
        listed = first_of(response, "results", "outputs")
        source = listed[0] if isinstance(listed, list) and listed else response
        text = first_of(source, *_TEXTS) if isinstance(source, dict) else None
        if text is None:
            raise BadRow("`response` holds neither choices nor output nor content")
        turn = LogTurn("assistant", take_text(text, "response"))
    return ModelAnswer(turn, FINISH_REASONS.get(reason or "", reason))


def _take_choice(value: Any) -> ModelAnswer:
    choices = take_list(value, "response.choices")
    if not choices:
        raise BadRow("`response.choices` is empty")
    choice = take_object(choices[0], "response.choices[0]")
    reason = take_fact(choice.get("finish_reason"))
    if "message" not in choice:
        return ModelAnswer(
            LogTurn("assistant", take_text(choice.get("text"), "response.choices[0].text")), reason
        )
    message = take_object(choice["message"], "response.choices[0].message")
    [turn] = take_message({**message, "role": "assistant"}, "response.choices[0].message")
    return ModelAnswer(turn, reason)


def _take_output(response: dict[str, Any]) -> ModelAnswer:
    """Read the output of the Responses API: reasoning, messages and tool calls in order."""
    parts: list[Any] = []
    for index, item in enumerate(take_list(response["output"], "response.output")):
        name = f"response.output[{index}]"
        kind = take_object(item, name).get("type")
        if kind == "message":
            content = item.get("content")
            parts += content if isinstance(content, list) else [take_text(content, f"{name}.content")]
        elif kind == "function_call":
            opened = open_json(item.get("arguments"))
            parts.append({"type": "tool_use", "name": item.get("name"), "input": opened})
        elif kind == "reasoning":
            parts.append(item)
        else:
            raise BadRow(f"`{name}` is neither a message, reasoning nor a call of a function")
    turn = take_assistant_parts(parts, "response.output")
    details = response.get("incomplete_details")
    reason = take_fact(details.get("reason")) if isinstance(details, dict) else None
    finished = "stop" if response.get("status") == "completed" else None
    return ModelAnswer(turn, FINISH_REASONS.get(reason, reason) if reason else finished)
