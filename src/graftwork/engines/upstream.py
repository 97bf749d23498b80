"""An engine process in front of another server: vLLM, SGLang, or any OpenAI-compatible endpoint.

vLLM and SGLang get tokens of our own template, so they read what training wrote, and adapters under names
made of their content, since both keep caches by name. They are found at a URL, or started here on a loopback
port, never a public one: those who can load adapters can read files. A server that is started here ends with
this process. An endpoint gets the messages and serves `base` only. Run as
`python -m graftwork.engines.upstream JOB.json`.
"""

import asyncio
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson

from graftwork.engines.constrained import require_call_form
from graftwork.engines.process import (
    AdapterSet,
    PromptRenderer,
    ReplyText,
    RequestRoom,
    run_engine,
)
from graftwork.engines.protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    estimate_tokens,
)
from graftwork.engines.upstream_messages import (
    DIALECTS,
    Dialect,
    RequestForm,
    UpstreamReply,
    explain_refusal,
    read_embeddings,
    write_format,
)
from graftwork.files.disk import append_to
from graftwork.http.client import ClientReply, UpstreamClient
from graftwork.http.messages import TIMEOUT_HEADER, ApiError, name_failure
from graftwork.model.adapter_shape import lora_rank
from graftwork.model.gguf import adapter_content
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.base import MIB
from graftwork.records.errors import EnvironmentFailure, WorkerFailed

LOG_FILE = "server.log"
LOWEST_RANK = 64
"""Least adapter rank to reserve: memory is reserved at the start, and later releases may have a higher
rank.
"""
_STOP_SECONDS = 20.0
_RUN_TIED = (
    "import runpy, sys; from graftwork.process.worker import stop_with_parent; stop_with_parent(); "
    "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Runs a module in a process that ends when its parent does, even after kill -9."""
KEEPS_TO_ITSELF = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Else it looks for this machine's address by way of a public name server.
    "VLLM_HOST_IP": "127.0.0.1",
}


def server_command(job: EngineJob, *, port: int) -> list[str]:
    """The command that serves the base with room for adapters."""
    ranks = [lora_rank(Path(folder)) or 0 for folder in job.adapters.values()]
    rank, most = str(max([LOWEST_RANK, *ranks])), job.engine.max_adapters
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if job.engine.kind == "vllm":
        adapters = ["--enable-lora", "--max-loras", str(most), "--max-cpu-loras", str(most + 1)]
        command = ["vllm.entrypoints.openai.api_server", "--model", job.base_folder, *adapters]
        command += ["--max-lora-rank", rank, "--dtype", job.dtype, "--generation-config", "vllm"]
    else:
        adapters = ["--enable-lora", "--max-loras-per-batch", str(most), "--max-loaded-loras", str(most + 1)]
        command = ["sglang.launch_server", "--model-path", job.base_folder, *adapters]
        command += ["--max-lora-rank", rank, "--lora-target-modules", "all", "--dtype", job.dtype]
    return [sys.executable, "-c", _RUN_TIED, *command, *where, *job.engine.arguments]


class UpstreamServer:
    """A vLLM or SGLang server as a child process."""

    def __init__(self, job: EngineJob) -> None:
        package = job.engine.kind
        if importlib.util.find_spec(package) is None:
            raise EnvironmentFailure(
                f"{package} is not installed in this environment",
                why="the engine is started from it",
                fix=f"pip install {package}, or start it elsewhere and set serve.engine.url",
                where="serve.engine.kind",
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = Path(job.folder) / LOG_FILE
        allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
        with append_to(self._log) as log:
            self._process = subprocess.Popen(
                server_command(job, port=port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **KEEPS_TO_ITSELF, **allowed, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def explain_end(self) -> WorkerFailed:
        lines = self._log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
        return WorkerFailed(
            f"the server ended with exit code {self._process.returncode}",
            why=lines[-1] if lines else "",
            fix="see its log",
            where=str(self._log),
        )

    def stop(self) -> None:
        """End it and the processes that it started."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


log = logging.getLogger(__name__)


_POLL_SECONDS = 0.2
_START_SECONDS = 900.0
_ANSWER_SECONDS = 30.0
"""Timeout for the list of models while the server starts; then it is requested again."""
_UNLIMITED = 2**31
_MOST_BYTES = 4 * MIB
"""Size limit of error responses and model lists."""
_MOST_EMBEDDED_BYTES = 256 * MIB
"""2,048 vectors of 4,096 numbers as text take about 180 MB."""


class UpstreamBackend:
    """An EngineBackend over a server that speaks HTTP."""

    def __init__(self, job: EngineJob, client: UpstreamClient, server: UpstreamServer | None = None) -> None:
        from graftwork.engines.llamacpp import max_positions

        self._job, self._client, self._server = job, client, server
        self._dialect: Dialect = DIALECTS[job.engine.kind]
        self._prompts: PromptRenderer | None = None
        if self._dialect.takes_tokens:
            self._prompts = PromptRenderer(job, positions=max_positions(Path(job.base_folder)))
        self._adapters: AdapterSet[str] = AdapterSet(most=job.engine.max_adapters)
        self._folders: dict[str, str] = {}
        self._loading = asyncio.Lock()
        self._room = RequestRoom(requests=_UNLIMITED, tokens=_UNLIMITED, queue_limit=job.queue_limit)
        self._base_name = job.engine.model or ""
        self._form = RequestForm()
        self._health = UpstreamHealth(client, job, server)

    async def start(self) -> None:
        """Wait for the server, find the name of its base and load the adapters of the job."""
        if not self._base_name:
            self._base_name = await self._find_base()
        for name, folder in self._job.adapters.items():
            await self.load_adapter(LoadAdapter(name=name, folder=folder, keep=tuple(self._job.adapters)))
        self._health.start()

    async def _find_base(self) -> str:
        until = asyncio.get_running_loop().time() + _START_SECONDS
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    reply = await self._client.get("/models")
                    if reply.status == 200:
                        return str(orjson.loads(await reply.read(most=_MOST_BYTES))["data"][0]["id"])
                    reply.close()
            except (OSError, orjson.JSONDecodeError, LookupError, TypeError):
                pass
            if self._server is not None and self._server.ended:
                raise self._server.explain_end()
            if asyncio.get_running_loop().time() > until:
                raise EnvironmentFailure(
                    f"the {self._job.engine.kind} server is not responding",
                    why=f"/models did not respond for {_START_SECONDS:.0f} s",
                    fix="start it, or check serve.engine.url (it ends with /v1)",
                    where="serve.engine.url",
                )
            await asyncio.sleep(_POLL_SECONDS)

    def state(self) -> dict[str, Any]:
        return {
            "models": [BASE, *self._adapters.names],
            "pid": os.getpid(),
            "waiting": self._room.waiting,
            "answered": self._room.answered,
            "template_fingerprint": None if self._prompts is None else self._prompts.fingerprint,
            "unreachable": self._health.reason,
        }

    async def load_adapter(self, request: LoadAdapter) -> None:
        if self._dialect.load_path is None:
            raise ApiError(400, "an endpoint serves no adapters: its model answers as `base`")
        async with self._loading:
            if request.name in self._adapters.names:
                return
            content = await asyncio.to_thread(adapter_content, Path(request.folder))
            name = f"graft-{content[:24]}"
            await self._load(name, request.folder)
            self._adapters.add(request.name, name)
            self._folders[name] = request.folder
            for unused in self._adapters.take_surplus(keep={*request.keep, request.name}):
                await self._tell(self._dialect.unload_path, {"lora_name": unused})
                self._folders.pop(unused, None)

    async def _load(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": str(Path(folder).resolve())}
        refusal = await self._tell(self._dialect.load_path, body)
        # Loaded before this process started: the name is the content, so it is the same adapter.
        if refusal is not None and "already" not in refusal.message:
            raise ApiError(400, f"the adapter could not be loaded: {refusal.message}")

    async def _tell(self, path: str | None, body: dict[str, Any]) -> ApiError | None:
        assert path is not None
        reply = await self._client.post(path, body, from_root=self._dialect.loads_at_root)
        answer = await reply.read(most=_MOST_BYTES)
        return None if reply.status == 200 else self._explain(reply.status, answer)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        if request.model not in (BASE, *self._adapters.names):
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        prompt, response_format, opening = None, None, ""
        template = None
        if self._prompts is not None:
            template = self._prompts.template
            prompt, response_format, opening = await self._render(request, self._prompts)
            room = self._prompts.room_after(prompt)
            request = request.model_copy(update={"max_tokens": min(request.max_tokens, room)})
        form = template.tool_form if template is not None and request.tools else None
        end, token_bytes = (0, None) if template is None else (template.eos, template.token_bytes)
        with self._adapters.using(None if request.model == BASE else request.model) as adapter:
            async with self._room.take(1):
                model = self._dialect.name_model(self._base_name, adapter)
                body = self._dialect.encode(
                    request, model=model, prompt=prompt, end=end, response_format=response_format
                )
                reply = await self._ask(request, body, adapter)
                answer = UpstreamReply(
                    request,
                    ReplyText(request, form, opening=opening),
                    token_bytes,
                    secrets=self._client.secrets,
                )
                try:
                    read = answer.read(reply, prompt_tokens=count_prompt(request, prompt))
                    async for piece in read:
                        yield piece
                finally:
                    # The server stops computing when the connection closes.
                    reply.close()

    async def embed(self, request: GenerateRequest) -> ReplyPiece:
        if request.model not in (BASE, *self._adapters.names):
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        with self._adapters.using(None if request.model == BASE else request.model) as adapter:
            async with self._room.take(1):
                model = self._dialect.name_model(self._base_name, adapter)
                reply = await self._client.post("/embeddings", {"model": model, **(request.embed or {})})
                answer = await reply.read(most=_MOST_EMBEDDED_BYTES)
        if reply.status != 200:
            raise self._explain(reply.status, answer)
        return read_embeddings(answer)

    async def _render(
        self, request: GenerateRequest, prompts: PromptRenderer
    ) -> tuple[list[int], dict[str, Any] | None, str]:
        """Return the prompt, the constraint of its answer, and the start of a call in it that the answer
        continues.
        """
        template = prompts.template
        tokens = await prompts.render(request)
        is_bound = bool(request.tools) and (request.tool_choice != "auto" or request.strict_tools)
        response_format, opening = write_format(request, require_call_form(template) if is_bound else None)
        if opening:
            tokens += template.encode_text(opening)
        return tokens, response_format, opening

    async def _ask(self, request: GenerateRequest, body: dict[str, Any], adapter: str | None) -> ClientReply:
        path, seconds = self._dialect.path(request), request.timeout_seconds
        allowed = () if seconds is None else ((TIMEOUT_HEADER, f"{max(seconds * 1000, 1):.0f}"),)
        sent = self._form.apply(body)
        reply = await self._client.post(path, sent, headers=allowed)
        if reply.status in (400, 404) and adapter is not None:
            refusal = self._explain(reply.status, await reply.read(most=_MOST_BYTES))
            if adapter not in refusal.message:
                raise refusal
            # The server was restarted and has forgotten its adapters.
            await self._load(adapter, self._folders[adapter])
            reply = await self._client.post(path, sent, headers=allowed)
        while reply.status in (400, 422) and not self._dialect.takes_tokens:
            # An endpoint that refuses a field which came from us is asked again without it.
            refusal = self._explain(reply.status, await reply.read(most=_MOST_BYTES))
            self._form.adapt(sent, refusal)
            before, sent = sent, self._form.apply(body)
            if sent == before:
                raise refusal
            reply = await self._client.post(path, sent, headers=allowed)
        if reply.status != 200:
            raise self._explain(reply.status, await reply.read(most=_MOST_BYTES))
        return reply

    def _explain(self, status: int, body: bytes) -> ApiError:
        refusal = explain_refusal(status, body, self._client.secrets)
        if status not in (401, 403):
            return refusal
        # The operator's mistake, not the client's: say which variable has the key.
        variable = self._job.engine.api_key_env
        why = f"the server rejects the key in {variable}" if variable else "the server asks for a key"
        return ApiError(502, f"{why}: {refusal.message}", code="upstream_key")

    async def close(self) -> None:
        self._health.stop()
        self._client.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def count_prompt(request: GenerateRequest, prompt: list[int] | None) -> int:
    """Prompt tokens for the usage if the server reports none; an estimate if the server renders the prompt
    itself.
    """
    if prompt is not None:
        return len(prompt)
    return estimate_tokens(sum(len(message.content) for message in request.messages))


async def _start(job: EngineJob) -> UpstreamBackend:
    engine, server = job.engine, None
    key = os.environ.get(engine.api_key_env, "").strip() if engine.api_key_env else None
    if engine.api_key_env and not key:
        raise EnvironmentFailure(
            f"the environment variable {engine.api_key_env} is empty or not set",
            why="it should hold the key of the engine's server",
            fix=f"export {engine.api_key_env}=… before `graft serve`",
            where="serve.engine.api_key_env",
        )
    url = engine.url
    if url is None:
        server = UpstreamServer(job)
        url = server.url
    backend = UpstreamBackend(job, UpstreamClient(url, key=key), server)
    try:
        await backend.start()
    except BaseException as error:
        await backend.close()
        if isinstance(error, ApiError):
            what, where = f"the {engine.kind} server rejected us", engine.url or "its log"
            fix = "check `serve.engine`: its URL, its key and the names of its models"
            raise EnvironmentFailure(what, why=error.message, fix=fix, where=where) from error
        raise
    return backend


class UpstreamHealth:
    """Probes the server. Call `start` once it has answered; read `reason`; call `stop`.

    Any answer below 500 is a sign of life: some servers have no list of models, and a wrong key shows in the
    answers themselves. A server that was started here and has ended, or stays silent, ends this process with
    it; the supervisor starts both again.
    """

    def __init__(self, client: UpstreamClient, job: EngineJob, server: UpstreamServer | None = None) -> None:
        self._client, self._job, self._server = client, job, server
        self._task: asyncio.Task[None] | None = None
        self.reason = ""
        """Why the server is unreachable; empty while it answers."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            await asyncio.sleep(self._job.probe_seconds)
            self.reason = await self._probe()
            if not self.reason:
                answered = clock()
            if self._server is None:
                continue
            if self._server.ended or clock() - answered >= self._job.restart_seconds:
                log.warning("engine: %s; ending with it", self.reason or "its server has ended")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    async def _probe(self) -> str:
        patience = 2 * self._job.probe_seconds
        try:
            async with asyncio.timeout(patience):
                reply = await self._client.get("/models")
                reply.close()
        except TimeoutError:
            return f"its server has not answered for {patience:g} s"
        except OSError as error:
            return f"its server cannot be reached: {name_failure(error)}"
        return f"its server answers with status {reply.status}" if reply.status >= 500 else ""


if __name__ == "__main__":
    raise SystemExit(run_engine(_start))
