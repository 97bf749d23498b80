"""llama.cpp in this process, through xllamacpp: a base in GGUF and its LoRA adapters.

Input: GGUF files, prompts as tokens. Output: tokens. `LlamaServer` is llama.cpp's own server on a unix socket
in a private folder; `LlamaCppEngine` asks it for evaluation, one request at a time and without reuse of
earlier prompts, so that the same question always gets the same answer. Prompts are rendered by our own
template.
"""

import http.client
import json
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graftwork.engines.interface import (
    DecodingSettings,
    EngineFacts,
    EngineReply,
    EngineSource,
    OnToken,
    RenderedPrompt,
    Timing,
)
from graftwork.process.machine import count_cores, peak_memory_gib
from graftwork.records.errors import EnvironmentFailure, WorkerFailed, pip_install
from graftwork.records.interaction import Message

LLAMACPP = "llamacpp"
"""The name of this engine in settings, jobs and reports."""
DEFAULT_PRECISION = "q8_0"
LONGEST_CONTEXT = 8192
"""Tokens of keys and values to reserve by default."""
ENDPOINT = "/completion"
_REQUEST_SECONDS = 600.0
_SEEDS = 2**32


class LlamaOptions(NamedTuple):
    """How a server runs. `context` is shared by all requests that run at once."""

    threads: int | None = None
    slots: int = 1
    context: int = LONGEST_CONTEXT
    exact: bool = False
    """Compute attention in float32, as the embedded engine does; else in part in float16."""


def serving_threads(threads: int | None) -> int:
    """Threads for serving. One core is left to the gateway and to other programs. llama.cpp's threads wait
    for each other in busy loops: one that shares its core holds up all others.
    """
    return threads or max(count_cores() - 1, 1)


def engine_version() -> str:
    """The version of the installed xllamacpp, which names the llama.cpp in it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("xllamacpp")
    except PackageNotFoundError as error:
        raise _not_installed() from error


class LlamaServer:
    """llama.cpp's server for one base and its adapters. Adapters are loaded only at its start."""

    def __init__(
        self,
        base: Path,
        adapters: Mapping[str, Path] = {},
        options: LlamaOptions = LlamaOptions(),  # noqa: B008
    ) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise _not_installed() from error
        self.context = options.context
        self._numbers = {name: number for number, name in enumerate(adapters)}
        # Not in a project's folder: the path of a unix socket is limited to about 100 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="graft-llama-")
        self.socket = str(Path(self._folder.name) / "llama.sock")
        params = xllamacpp.CommonParams()
        params.model.path = str(base)
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), 0.0) for path in adapters.values()]
        params.lora_init_without_apply = True
        params.n_ctx = options.context
        params.n_parallel = options.slots
        params.kv_unified = True
        params.cache_ram_mib = 0
        params.hostnames = [self.socket]
        params.n_threads_http = options.slots + 2
        params.verbosity = 1
        if options.exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            # Flash attention rounds queries to float16.
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = False
        params.fit_params = False
        for group in (params.cpuparams, params.cpuparams_batch):
            group.n_threads = options.threads or count_cores()
            group.poll = 0  # a thread that polls takes the CPU from the gateway
        try:
            self._server: Any = xllamacpp.Server(params)
        except RuntimeError as error:
            self._folder.cleanup()
            raise WorkerFailed(
                "llama.cpp could not load the model",
                why=str(error),
                fix="see the log of the engine; `graft eval` with the embedded engine checks the weights",
                where=str(base),
            ) from error
        self._wait_for_queue()

    def _wait_for_queue(self) -> None:
        """Ask for something that goes through llama.cpp's queue of tasks.

        It accepts connections before its loop takes tasks. A server that is closed in between never ends: its
        loop begins after the order to stop.
        """
        with closing(_UnixConnection(self.socket)) as connection:
            connection.request("GET", "/lora-adapters")
            connection.getresponse().read()

    def encode(
        self,
        prompt: Sequence[int],
        decoding: DecodingSettings,
        *,
        adapter: str | None,
        reuse: bool = True,
        **options: Any,
    ) -> bytes:
        """Encode the body of a request, streamed by default. `reuse` keeps the common prefix of an earlier
        prompt.
        """
        sampled = decoding.temperature > 0
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": reuse,
            "lora": [] if adapter is None else [{"id": self._numbers[adapter], "scale": 1.0}],
            # As the embedded engine samples: the temperature, then top_p, and nothing else.
            **({"samplers": ["temperature", "top_p"]} if sampled else {"samplers": ["top_k"], "top_k": 1}),
            "top_p": decoding.top_p,
            **({"seed": decoding.seed % _SEEDS} if decoding.seed is not None else {}),
            **options,
        }
        return json.dumps(body).encode()

    def events(self, body: bytes) -> Iterator[dict[str, Any]]:
        """Send a request and yield its events, or its one answer. Leaving early cancels it."""
        with closing(_UnixConnection(self.socket)) as connection:
            connection.request("POST", ENDPOINT, body=body, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(answer.read())
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if data and data != b"[DONE]":
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise _refused(data)
                    yield event

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text by llama.cpp's own tokenizer."""
        with closing(_UnixConnection(self.socket)) as connection:
            connection.request("POST", "/tokenize", body=json.dumps({"content": text}).encode())
            tokens: list[int] = json.loads(connection.getresponse().read())["tokens"]
            return tokens

    def close(self) -> None:
        """Wait for running requests to end, then free the memory."""
        self._server = None
        self._folder.cleanup()


class LlamaCppEngine:
    """A MeasuringEngine over llama.cpp. `source.precision` is the type of the matrices in the GGUF file."""

    def __init__(self, source: EngineSource) -> None:
        from graftwork.model.chat.template import ChatTemplate

        self._source = source
        self._folders = dict(source.adapters)
        self.template = ChatTemplate.from_folder(source.base_folder, reasoning=source.reasoning)
        self._server = self._start()
        name = f"{LLAMACPP} {engine_version()}"
        self.facts = EngineFacts(
            name=name,
            precision=source.precision,
            fingerprint=source.fingerprint,
            details={
                "engine": name,
                "device": "cpu",
                "base_as": f"{source.precision} in GGUF",
                "threads": source.threads or count_cores(),
            },
        )

    def _start(self) -> LlamaServer:
        from graftwork.model.gguf import adapter_file, base_file

        folder = self._source.base_folder
        return LlamaServer(
            base_file(folder, precision=self._source.precision),  # type: ignore[arg-type]
            {name: adapter_file(adapter, base=folder) for name, adapter in self._folders.items()},
            LlamaOptions(
                threads=self._source.threads,
                context=min(max_positions(folder), LONGEST_CONTEXT),
                exact=self._source.precision == "f32",
            ),
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._folders)

    def load_adapter(self, name: str, folder: Path) -> None:
        self._folders[name] = folder
        self._server.close()
        self._server = self._start()

    def render(self, messages: tuple[Message, ...]) -> RenderedPrompt:
        return RenderedPrompt(messages, self.template.prompt(messages))

    def answer(
        self,
        prompts: Sequence[RenderedPrompt],
        decoding: DecodingSettings,
        *,
        adapter: str | None = None,
        on_token: OnToken | None = None,
    ) -> list[EngineReply]:
        """Answer one after another: rows of a batch would change each other's last digits. `on_token` is
        called once the answer is complete.
        """
        replies = []
        for row, prompt in enumerate(prompts):
            seeded = decoding._replace(seed=((decoding.seed or 0) + row) % _SEEDS)
            # Not streamed: llama.cpp's stream leaves out the tokens of a character that is not whole yet.
            (event,) = self._ask(prompt, seeded, adapter, stream=False)
            tokens: list[int] = event["tokens"]
            if tokens and tokens[-1] == self.template.eos:
                tokens.pop()
            for token in tokens if on_token is not None else ():
                assert on_token is not None
                on_token(row, token)
            reason = finish_reason(event)
            replies.append(EngineReply(self.template.decode(tokens), len(tokens), len(prompt.tokens), reason))
        return replies

    def time_one(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Timing:
        began = time.perf_counter()
        first: float | None = None
        for _ in self._ask(prompt, decoding, adapter):
            first = first or time.perf_counter() - began
        return Timing(first, time.perf_counter() - began)

    def reply_losses(
        self, conversations: Sequence[tuple[tuple[Message, ...], str]], *, adapter: str | None = None
    ) -> list[float | None]:
        """None for all: llama.cpp's server returns no probabilities of a prompt."""
        return [None] * len(conversations)

    def peak_memory_gib(self) -> float:
        return peak_memory_gib()

    def close(self) -> None:
        self._server.close()

    def _ask(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, adapter: str | None, *, stream: bool = True
    ) -> Iterator[dict[str, Any]]:
        room = self._server.context - len(prompt.tokens)
        fitted = decoding._replace(max_new_tokens=max(min(decoding.max_new_tokens, room), 1))
        body = self._server.encode(prompt.tokens, fitted, adapter=adapter, reuse=False, stream=stream)
        return self._server.events(body)


def finish_reason(event: Mapping[str, Any]) -> Literal["stop", "length"]:
    """Why an answer ended, by its last event."""
    return "length" if event["stop_type"] == "limit" else "stop"


def max_positions(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("max_position_embeddings") or LONGEST_CONTEXT)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_REQUEST_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _refused(body: bytes) -> WorkerFailed:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:300]
    return WorkerFailed("llama.cpp refused a request", why=message, fix="see the log of the engine")


def _not_installed() -> EnvironmentFailure:
    return EnvironmentFailure(
        "xllamacpp is not installed",
        why="the llama.cpp engine runs through it",
        fix=pip_install("llamacpp"),
    )
