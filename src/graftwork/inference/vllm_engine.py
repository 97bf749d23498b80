"""vLLM's offline engine as a subject. `engines.py` says when it is used.

In: an EvalJob. Out: the same as `own.OwnModel` gives. Prompts go in as tokens of our own template, in the
precision that our own engine would use, so that both engines are asked exactly the same. The engine works
inside this process: whoever ends this process has ended all of it. It reports nothing to anybody and asks
nothing of the network. Seen to work with vLLM 0.32 on the processor; not seen on a card.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graftwork.inference.engine import Timing
from graftwork.inference.selection import SWITCH, TRIED, adapted_modules, lora_rank, settle
from graftwork.process.memory import peak_memory_gib
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.interaction import Message
from graftwork.records.report import EvalJob
from graftwork.records.units import GIB

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


class Reply(NamedTuple):
    tokens: list[int]
    finish_reason: Literal["stop", "length"]


class VllmModel:
    """The base, with the job's adapter on every request where it names one."""

    def __init__(self, job: EvalJob) -> None:
        self._on_card = job.device.startswith("cuda")
        # Read when torch and vLLM are imported: nothing of them before these lines.
        os.environ.update(KEEPS_TO_ITSELF if self._on_card else {**KEEPS_TO_ITSELF, **NOT_COMPILED})
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

        from graftwork.model.template import Template
        from graftwork.model.threads import use_threads

        self._job = job = settle(job)
        threads = None if self._on_card else use_threads(job.threads)
        self.template = Template.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        adapter = Path(job.adapter_folder) if job.adapter_folder else None
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]

            self._vllm = vllm
            self._engine = vllm.LLM(**self._options(adapter))
            self._lora = self._request(adapter) if adapter is not None else None
        except Exception as trouble:
            raise _did_not_start(job, trouble) from trouble
        self.described: dict[str, Any] = {
            "engine": f"vllm {getattr(vllm, '__version__', 'of an unknown version')}",
            "device": "cuda" if self._on_card else "cpu",
            "base_as": f"{job.precision}, not quantised",
            "threads": threads,
            "memory": "what vLLM reserves on the card, most of it for its cache"
            if self._on_card
            else f"with {CACHE_ON_PROCESSOR // GIB} GiB that vLLM reserves for its cache",
        }

    def generate(self, prompts: list[list[int]]) -> list[Reply]:
        return self._ask(prompts, temperature=0.0, seed=self._job.seed)

    def sample(self, prompts: list[list[int]], seed: int) -> list[Reply]:
        return self._ask(prompts, temperature=self._job.temperature, seed=seed)

    def time_one(self, prompt: list[int]) -> Timing:
        """One request alone, heard to its first token where the engine keeps its times."""
        # What it remembers of this prompt from answering it before would be no user's waiting time.
        self._engine.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = self._run([prompt], [self._params(self._job.temperature, self._job.seed)])
        total = time.perf_counter() - began
        first = getattr(getattr(output, "metrics", None), "first_token_latency", None)
        return Timing(min(float(first), total) if first else None, total)

    def weigh(self, conversations: list[tuple[tuple[Message, ...], str]]) -> list[float | None]:
        """The mean loss of a token of each reply, read off the log-probabilities of the prompt."""
        from graftwork.model.template import CannotProve

        rows = self.template.render_batch(conversations)
        good = [(place, row) for place, row in enumerate(rows) if not isinstance(row, CannotProve)]
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        losses: list[float | None] = [None] * len(rows)
        outputs = self._run([list(row.tokens) for _, row in good], [params] * len(good))
        for (place, row), output in zip(good, outputs, strict=True):
            told = output.prompt_logprobs
            reply = range(row.trained_from, len(row.tokens))
            losses[place] = -sum(told[at][row.tokens[at]].logprob for at in reply) / len(reply)
        return losses

    def peak_memory_gib(self) -> float:
        """What is taken on the card, by whomever; else of this process."""
        if not self._on_card:
            return peak_memory_gib()
        import torch

        free, total = torch.cuda.mem_get_info()
        return float((total - free) / GIB)

    def _options(self, adapter: Path | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self._job.base_folder,
            # Named: `auto` makes half precision of files in float32.
            "dtype": self._job.precision,
            "seed": self._job.seed,
            "trust_remote_code": False,
            "enable_prefix_caching": True,
            # The base's own generation_config would bring its temperature and penalties with it.
            "generation_config": "vllm",
            # Only then does it tell when the first token came.
            "disable_log_stats": False,
        }
        if not self._on_card:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": CACHE_ON_PROCESSOR}
        if adapter is not None:
            # One adapter at a time; the default of 16 refuses larger ones.
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(adapter)}
            # Left to itself it makes room in the last layer too, and then fails at weighing replies.
            options["lora_target_modules"] = list(adapted_modules(adapter))
        return options

    def _ask(self, prompts: list[list[int]], *, temperature: float, seed: int) -> list[Reply]:
        # A seed for each: with one for all, the same prompt asked twice would be answered the same twice.
        params = [self._params(temperature, (seed + place) % SEEDS) for place in range(len(prompts))]
        return [self._reply(output.outputs[0]) for output in self._run(prompts, params)]

    def _run(self, prompts: list[list[int]], params: list[Any]) -> Sequence[Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Sequence[Any] = self._engine.generate(asked, params, lora_request=self._lora, use_tqdm=False)
        return outputs

    def _params(self, temperature: float, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=temperature,
            top_p=self._job.top_p if temperature > 0 else 1.0,
            seed=seed if temperature > 0 else None,
            max_tokens=self._job.max_new_tokens,
            # The template's end of turn and no other, as our own engine does it.
            ignore_eos=True,
            stop_token_ids=[self.template.eos],
            detokenize=False,
        )

    def _reply(self, said: Any) -> Reply:
        tokens = list(said.token_ids)
        if tokens and tokens[-1] == self.template.eos:
            # The end of turn is counted among the tokens there; it is no part of the answer.
            tokens.pop()
        return Reply(tokens, "length" if said.finish_reason == "length" else "stop")

    def _request(self, adapter: Path) -> Any:
        from vllm.lora.request import (  # type: ignore[import-not-found, unused-ignore]
            LoRARequest,
        )

        # The name carries the hash: the engine caches by it, and a path may be used again.
        return LoRARequest(f"adapter-{self._job.identity[:12] or adapter.name}", 1, str(adapter))


def _did_not_start(job: EvalJob, trouble: Exception) -> EnvironmentLacks:
    words = str(trouble).strip().splitlines()
    return EnvironmentLacks(
        f"{job.engine} could not be started for {job.subject}",
        why=f"{type(trouble).__name__}: {words[0] if words else 'it said nothing more'}",
        fix=f"set {SWITCH}=0 to ask with Graftwork's own engine; vLLM {TRIED} is the one that was tried",
        where=job.folder,
    )
