"""The llama.cpp engine: the base in GGUF and its adapters in one process, behind a unix socket.

Converts what it serves by itself; converted files are kept by content. llama.cpp loads adapters only when it
starts, so a new release starts a second server on the same mapped file; the first one ends when its last
answer is sent. Run as `python -m graftwork.engines.llamacpp_process JOB.json`.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson

from graftwork.engines.constrained import ONE_LINE, GrammarCompiler, GrammarConstraint
from graftwork.engines.interface import DecodingSettings
from graftwork.engines.llamacpp import (
    ENDPOINT,
    LlamaOptions,
    LlamaServer,
    finish_reason,
    max_positions,
    serving_threads,
)
from graftwork.engines.process import (
    AdapterSet,
    PromptRenderer,
    ReplyText,
    RequestRoom,
    describe_token,
    run_engine,
)
from graftwork.engines.protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    LogprobData,
    ReplyPiece,
)
from graftwork.http.client import Client, ClientReply
from graftwork.http.messages import JSON_TYPE, ApiError
from graftwork.model.gguf import adapter_file, base_file
from graftwork.records.errors import GraftError


class _RunningServer:
    """A server that ends when it is retired and its last request is answered."""

    def __init__(self, server: LlamaServer) -> None:
        self.server = server
        self._users = 0
        self._retired = False

    async def __aenter__(self) -> LlamaServer:
        self._users += 1
        return self.server

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        await self._end_if_idle()

    async def retire(self) -> None:
        self._retired = True
        await self._end_if_idle()

    async def _end_if_idle(self) -> None:
        if self._retired and not self._users:
            await asyncio.shield(asyncio.to_thread(self.server.close))


class LlamaCppBackend:
    """An EngineBackend over llama.cpp."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._folder = Path(job.base_folder)
        self._context = min(job.engine.context, max_positions(self._folder))
        self._prompts = PromptRenderer(job, positions=self._context)
        self._grammars = GrammarCompiler(self._prompts.template, layout=ONE_LINE)
        self._base = base_file(self._folder, precision=job.engine.precision)
        self._adapters: AdapterSet[Path] = AdapterSet(most=job.engine.max_adapters)
        for name, folder in job.adapters.items():
            self._adapters.add(name, adapter_file(Path(folder), base=self._folder))
        self._loading = asyncio.Lock()
        self._running = _RunningServer(self._start(self._adapters.items()))
        self._room = RequestRoom(requests=job.batch_size, tokens=self._context, queue_limit=job.queue_limit)

    def _start(self, adapters: dict[str, Path]) -> LlamaServer:
        options = LlamaOptions(
            threads=serving_threads(self._job.threads),
            slots=self._job.batch_size,
            context=self._context,
            exact=self._job.engine.precision == "f32",
        )
        return LlamaServer(self._base, adapters, options)

    def state(self) -> dict[str, Any]:
        return {
            "models": [BASE, *self._adapters.names],
            "pid": os.getpid(),
            "waiting": self._room.waiting,
            "answered": self._room.answered,
            "template_fingerprint": self._prompts.fingerprint,
        }

    async def load_adapter(self, request: LoadAdapter) -> None:
        async with self._loading:
            if request.name in self._adapters.names:
                return
            try:
                file = await asyncio.to_thread(adapter_file, Path(request.folder), base=self._folder)
                started = await asyncio.to_thread(self._start, {**self._adapters.items(), request.name: file})
            except (GraftError, OSError, ValueError, KeyError) as error:
                raise ApiError(400, f"the adapter could not be loaded: {error}") from error
            self._adapters.add(request.name, file)
            # What is removed stays in the memory of this server, and is left out of the next one.
            self._adapters.take_surplus(keep={*request.keep, request.name})
            retired, self._running = self._running, _RunningServer(started)
        await retired.retire()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        if request.model not in (BASE, *self._adapters.names):
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        prompt = await self._prompts.render(request)
        constraint = await self._grammars.compile_for(request)
        tokens = min(request.max_tokens, self._prompts.room_after(prompt))
        adapter = None if request.model == BASE else request.model
        with self._adapters.using(adapter):
            async with self._room.take(len(prompt) + tokens), self._running as server:
                decoding = DecodingSettings(tokens, request.temperature, request.top_p, request.seed)
                options: dict[str, Any] = {}
                if constraint is not None:
                    options["grammar"] = f"%llguidance {{}}\n{constraint.grammar}"
                if request.logprobs is not None:
                    options["n_probs"] = max(request.logprobs, 1)
                body = server.encode(prompt, decoding, adapter=adapter, **options)
                client = Client(path=server.socket, keep=0)
                reply = await client.send("POST", ENDPOINT, body=body, headers=(JSON_TYPE,))
                try:
                    text = ReplyText(request, self._prompts.template.tool_form)
                    async for piece in _read(reply, request, text, constraint):
                        yield piece
                finally:
                    # llama.cpp stops computing when the connection closes.
                    reply.close()

    async def close(self) -> None:
        await self._running.retire()


async def _read(
    reply: ClientReply, request: GenerateRequest, flow: ReplyText, constraint: GrammarConstraint | None
) -> AsyncGenerator[ReplyPiece, None]:
    if reply.status != 200:
        raise _explain(reply.status, await reply.read())
    text, unsent, count = "", "", 0
    logprobs: list[LogprobData] | None = None if request.logprobs is None else []
    async for data in reply.events():
        event = orjson.loads(data)
        if "error" in event:
            raise _explain(500, orjson.dumps(event))
        text += event["content"]
        count = event.get("tokens_predicted", count)
        unsent += flow.push(text)
        if logprobs is not None:
            logprobs += _read_logprobs(event, request.logprobs or 0)
        if flow.stopped is not None or event["stop"]:
            reason = "stop" if flow.stopped is not None else finish_reason(event)
            if constraint is not None and event["stop"] and reason == "stop" and not constraint.accepts(text):
                # llama.cpp continues without the grammar where one of its steps exceeds a limit.
                message = "the schema needs more work than llama.cpp allows for a token"
                raise ApiError(400, message, param="response_format", code="unsupported_schema")
            # The token that ends the turn is counted by llama.cpp, and is not part of the answer.
            answer_tokens = count - 1 if event["stop"] and event.get("stop_type") == "eos" else count
            remaining, calls = flow.finish(unsent)
            yield ReplyPiece(
                text=remaining,
                finish_reason=reason,
                prompt_tokens=event["tokens_evaluated"],
                reply_tokens=answer_tokens,
                tool_calls=calls,
                logprobs=None if logprobs is None else tuple(logprobs),
                stop=flow.stopped,
            )
            return
        if request.stream and unsent:
            yield ReplyPiece(text=unsent, logprobs=None if logprobs is None else tuple(logprobs))
            unsent, logprobs = "", None if logprobs is None else []
    raise ApiError(502, "llama.cpp ended its answer too early", code="engine_error")


def _read_logprobs(event: dict[str, Any], most: int) -> list[LogprobData]:
    return [
        {
            **describe_token(bytes(token["bytes"]), token["logprob"]),
            "top_logprobs": [
                describe_token(bytes(alternative["bytes"]), alternative["logprob"])
                for alternative in token["top_logprobs"][:most]
            ],
        }
        for token in event.get("completion_probabilities") or ()
    ]


def _explain(status: int, body: bytes) -> ApiError:
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = "llama.cpp refused the request"
    return ApiError(status if status in (400, 429, 503) else 502, message, code="engine_error")


async def _start(job: EngineJob) -> LlamaCppBackend:
    return LlamaCppBackend(job)


if __name__ == "__main__":
    raise SystemExit(run_engine(_start))
