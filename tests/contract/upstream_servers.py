"""Stand-ins for vLLM 0.32, SGLang 0.5 and an OpenAI-compatible API, which validate what they are sent.

A field that the real server does not have is refused, and so is a value of the wrong type, a tool result
without its call, an adapter that is not loaded or loaded twice, and a model name in the other server's form.
"""

import asyncio
import base64
import json
import struct
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graftwork.http.messages import ApiError, Response, StreamResponse, json_response

MODEL = "base-model"
EVENTS = (("content-type", "text/event-stream"),)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool


class NamedSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Structure(Strict):
    begin: str
    schema_: dict[str, Any] = Field(alias="schema")
    end: str


class TaggedFormat(Strict):
    type: Literal["structural_tag"]
    structures: list[Structure]
    triggers: list[str]


class Sampled(Strict):
    model: str
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stream: Literal[True]
    stream_options: StreamOptions


class SglangCompletion(Sampled):
    prompt: list[int]
    logprobs: int | None = None
    stop_token_ids: list[int]
    skip_special_tokens: bool
    response_format: JsonFormat | TaggedFormat | None = None


class VllmCompletion(SglangCompletion):
    return_tokens_as_token_ids: bool | None = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    name: str
    arguments: str


class Call(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Turn(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[Call] = []
    tool_call_id: str | None = None


class ChatCompletion(Sampled):
    messages: list[Turn]
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TextCompletion(Sampled):
    prompt: str
    logprobs: int | None = None


class Embeddings(Strict):
    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def validate(kind: type[Strict], body: bytes) -> Any:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ApiError(400, fault["msg"], param=".".join(map(str, fault["loc"]))) from error


def event(value) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class LoraServer:
    """vLLM or SGLang as far as this engine uses them. `says` is what it answers, piece by piece."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loaded: dict[str, str] = {}
        self.unloaded: list[str] = []
        self.bodies: list[dict] = []
        self.says: tuple[str, ...] = ("one", " two", " three", " four")
        self.cancelled = asyncio.Event()
        self.hold = False

    async def handle(self, request):
        prefix = "/v1" if self.kind == "vllm" else ""
        if request.path == "/v1/models":
            return json_response({"data": [{"id": MODEL}]})
        body = json.loads(request.body)
        if request.path == f"{prefix}/load_lora_adapter":
            if body["lora_name"] in self.loaded:
                raise ApiError(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            self.loaded[body["lora_name"]] = body["lora_path"]
            return json_response({"message": "Success"})
        if request.path == f"{prefix}/unload_lora_adapter":
            self.unloaded.append(body["lora_name"])
            del self.loaded[body["lora_name"]]
            return json_response({"message": "Success"})
        if request.path == "/v1/completions":
            validate(VllmCompletion if self.kind == "vllm" else SglangCompletion, request.body)
            return self.complete(body)
        raise ApiError(404, f"no {request.path}")

    def complete(self, body):
        self.bodies.append(body)
        names = {MODEL, *(name if self.kind == "vllm" else f"{MODEL}:{name}" for name in self.loaded)}
        if body["model"] not in names:
            raise ApiError(404, f"The model `{body['model']}` does not exist.")
        return StreamResponse(200, self.events(body), EVENTS)

    async def events(self, body):
        said = self.says[: body["max_tokens"]]
        stopped = None
        try:
            for text in said:
                stopped = next((stop for stop in body.get("stop") or () if stop in text), None)
                if stopped is not None:
                    break
                yield event({"choices": [self.choice(body, text)]})
                while self.hold:
                    await asyncio.sleep(0.01)
            reason = "length" if len(said) < len(self.says) else "stop"
            named = "stop_reason" if self.kind == "vllm" else "matched_stop"
            yield event({"choices": [{"text": "", "finish_reason": reason, named: stopped}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(said)}
            yield event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        except BaseException:
            self.cancelled.set()
            raise

    def choice(self, body, text):
        choice = {"index": 0, "text": text, "finish_reason": None}
        if (most := body.get("logprobs")) is not None:
            name = "token_id:7" if body.get("return_tokens_as_token_ids") else text
            others = {f"token_id:{n}" if "token_id" in name else f"w{n}": -1.0 - n for n in range(most)}
            choice["logprobs"] = {
                "tokens": [name], "token_logprobs": [-0.5], "top_logprobs": [{**others, name: -0.5}],
                "text_offset": [0],
            }  # fmt: skip
        return choice


class ChatServer:
    """An OpenAI-compatible API with a key: answers by what it is asked for."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.bodies: list[dict] = []
        self.arguments = ('{"place": "Bern"}', "{}")
        """Of the two calls that it answers a user's turn with, if there are tools."""
        self.refuses = ""
        """A field that this server does not take."""

    async def handle(self, request):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            raise ApiError(401, "wrong key")
        kinds = {
            "/v1/chat/completions": ChatCompletion,
            "/v1/completions": TextCompletion,
            "/v1/embeddings": Embeddings,
        }
        if request.path not in kinds:
            raise ApiError(404, f"no {request.path}")
        asked = validate(kinds[request.path], request.body)
        body = json.loads(request.body)
        if self.refuses and self.refuses in body:
            raise ApiError(400, f"Unsupported parameter: {self.refuses}", param=self.refuses)
        self.bodies.append(body)
        if request.path == "/v1/embeddings":
            return self.embed(asked)
        if request.path == "/v1/completions":
            return StreamResponse(200, self.events([{"text": f"{asked.prompt} and on"}]), EVENTS)
        self.check_results(asked.messages)
        return StreamResponse(200, self.events(self.answer(asked)), EVENTS)

    def check_results(self, turns):
        made = set()
        for turn in turns:
            made |= {call.id for call in turn.tool_calls}
            if turn.role == "tool" and turn.tool_call_id not in made:
                raise ApiError(400, "a tool result has no call", param="messages")

    def answer(self, asked):
        if asked.tools and asked.tool_choice != "none" and asked.messages[-1].role == "user":
            name = asked.tools[0].function.name
            one, two = self.arguments
            return [
                {"delta": {"tool_calls": [self.part(0, one[:5], name), self.part(1, "", name)]}},
                {"delta": {"tool_calls": [self.part(0, one[5:]), self.part(1, two)]}},
            ]
        if asked.response_format is not None and asked.response_format.type != "text":
            return [{"delta": {"content": '{"sure": '}}, {"delta": {"content": "true}"}}]
        texts = [f"{asked.model}:", f" {asked.messages[-1].content}"]
        choices = [{"delta": {"content": text}} for text in texts]
        if asked.logprobs:
            for choice, text in zip(choices, texts, strict=True):
                top = [{"token": f"t{n}", "logprob": -1.0 - n, "bytes": None} for n in range(2)]
                token = {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": top}
                choice["logprobs"] = {"content": [token], "refusal": None}
        return choices

    def part(self, index, arguments, name=None):
        if name is None:
            return {"index": index, "function": {"arguments": arguments}}
        function = {"name": name, "arguments": arguments}
        return {"index": index, "id": f"call_{index}", "type": "function", "function": function}

    async def events(self, choices):
        calls = any("tool_calls" in choice.get("delta", {}) for choice in choices)
        for choice in choices:
            yield event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
        last = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
        yield event({"choices": [last]})
        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
        yield event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def embed(self, asked):
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        packed = asked.encoding_format == "base64"
        vectors = [struct.pack("<2f", 0.5, len(text)) for text in texts]
        values = [base64.b64encode(v).decode() if packed else struct.unpack("<2f", v) for v in vectors]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(values)]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        body = {"object": "list", "data": data, "model": asked.model, "usage": usage}
        return Response(200, json.dumps(body).encode(), (("content-type", "application/json"),))
