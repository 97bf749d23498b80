"""An engine that answers what a script says: the same pieces for the same last message."""

from graftwork.engines.protocol import ReplyPiece
from graftwork.http.messages import ApiError

WEATHER = {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
CLOCK = {"name": "clock", "arguments": "{}"}


def token(text, logprob):
    other = {"token": "Hm", "logprob": -3.5, "bytes": list(b"Hm")}
    own = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
    return {**own, "top_logprobs": [own, other]}


def end(reason="stop", *, asked=12, said=4, **more):
    return ReplyPiece(text="", finish_reason=reason, prompt_tokens=asked, reply_tokens=said, **more)


SCRIPT = {
    "greet": [ReplyPiece(text="Good"), ReplyPiece(text=" morning"), ReplyPiece(text=", Zoë 🙂"), end(said=5)],
    "ramble": [ReplyPiece(text="and so"), ReplyPiece(text=" on"), end("length", said=3)],
    "silence": [end(said=1)],
    "stop": [ReplyPiece(text="One"), end(said=2, stop="END")],
    "json": [ReplyPiece(text='{"open":'), ReplyPiece(text=" true}"), end()],
    "likely": [
        ReplyPiece(text="Yes", logprobs=(token("Yes", -0.25),)),
        ReplyPiece(text="!", logprobs=(token("!", -0.5),)),
        end(said=2),
    ],
    "call": [
        ReplyPiece(text="I look."),
        ReplyPiece(text="", call_deltas=({"index": 0, "name": "weather", "arguments": ""},)),
        ReplyPiece(text="", call_deltas=({"index": 0, "arguments": '{"city": "Oslo"'},)),
        ReplyPiece(text="", call_deltas=({"index": 0, "arguments": ', "days": 2}'},)),
        end("tool_calls", said=9, tool_calls=(WEATHER,)),
    ],
    "two calls": [
        ReplyPiece(
            text="", call_deltas=({"index": 0, "name": "weather", "arguments": WEATHER["arguments"]},)
        ),
        ReplyPiece(text="", call_deltas=({"index": 1, "name": "clock", "arguments": "{}"},)),
        end("tool_calls", said=14, tool_calls=(WEATHER, CLOCK)),
    ],
}


class ScriptedEngine:
    """An EngineBackend."""

    def __init__(self, models):
        self._models = ["base", *models]

    def state(self):
        return {"models": self._models, "pid": 1}

    async def load_adapter(self, request):
        raise ApiError(400, "no adapter is loaded here")

    async def generate(self, request):
        if request.model not in self._models:
            raise ApiError(404, f"the engine does not hold {request.model}")
        question = request.prompt if request.prompt is not None else request.messages[-1].content
        if question == "full":
            raise ApiError(429, "the engine is full; try again soon", code="full")
        if question == "too long":
            message = "the prompt takes 9000 tokens; the engine has room for 8192 tokens"
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        if question == "break":
            yield ReplyPiece(text="It")
            raise ApiError(503, "the engine's server is not responding", code="engine_down")
        for piece in SCRIPT.get(question) or [ReplyPiece(text=f"You said: {question}"), end()]:
            yield piece
