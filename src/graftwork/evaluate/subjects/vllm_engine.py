"""vLLM's offline engine as a subject: used where the package is installed and there is a card.

In: an EvalJob. Out: the same as `own.OwnModel` gives. Prompts go in as tokens of our own template, so that
both engines are asked exactly the same. An adapter that vLLM cannot serve (DoRA, full weights, added
modules) is left to our own engine. Written against vLLM's documented offline API (`LLM`, `SamplingParams`,
`LoRARequest`) and tested against a stand-in of it; not run against a live vLLM yet.
"""

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graftwork.evaluate.ask import Timing
from graftwork.records.interaction import Message
from graftwork.records.report import EvalJob

CONFIG_FILE = "adapter_config.json"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes that vLLM lays out memory for; an adapter takes the next one above its rank."""


class Reply(NamedTuple):
    tokens: list[int]
    finish_reason: Literal["stop", "length"]


def can_use_vllm(job: EvalJob) -> bool:
    """Whether this job's subject can be asked through vLLM here. GRAFT_VLLM=0 says no."""
    if not job.device.startswith("cuda") or os.environ.get("GRAFT_VLLM") == "0":
        return False
    if importlib.util.find_spec("vllm") is None:
        return False
    return job.adapter_folder is None or lora_rank(Path(job.adapter_folder)) is not None


def lora_rank(folder: Path) -> int | None:
    """The memory that vLLM must lay out for the adapter; None for one that it cannot serve."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or config.get("use_dora") or config.get("modules_to_save"):
        return None
    largest = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((rank for rank in RANKS if rank >= largest), None)


class VllmModel:
    """The base, with the job's adapter on every request where it names one."""

    def __init__(self, job: EvalJob) -> None:
        import vllm  # type: ignore[import-not-found, unused-ignore]

        from graftwork.model.template import Template

        self._job, self._vllm = job, vllm
        self.template = Template.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        adapter = Path(job.adapter_folder) if job.adapter_folder else None
        lora: dict[str, Any] = {}
        if adapter is not None:
            # One adapter at a time; the default of 16 refuses larger ones.
            lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(adapter)}
        self._engine = vllm.LLM(
            model=job.base_folder,
            dtype="auto",
            seed=job.seed,
            trust_remote_code=False,
            enable_prefix_caching=True,
            # The base's own generation_config would bring its temperature and penalties with it.
            generation_config="vllm",
            **lora,
        )
        self._lora = self._request(adapter) if adapter is not None else None
        self.described: dict[str, Any] = {
            "engine": f"vllm {getattr(vllm, '__version__', 'unknown')}",
            "device": "cuda",
            "base_as": "the precision of its files, not quantised",
            "threads": None,
            "memory": "what vLLM reserves on the card, most of it for its cache",
        }

    def generate(self, prompts: list[list[int]]) -> list[Reply]:
        return self._ask(prompts, temperature=0.0, seed=self._job.seed)

    def sample(self, prompts: list[list[int]], seed: int) -> list[Reply]:
        return self._ask(prompts, temperature=self._job.temperature, seed=seed)

    def time_one(self, prompt: list[int]) -> Timing:
        """One request alone; the first token where the engine keeps its times."""
        began = time.perf_counter()
        (output,) = self._run([prompt], self._params(self._job.temperature, self._job.seed))
        total = time.perf_counter() - began
        first = getattr(getattr(output, "metrics", None), "first_token_latency", None)
        return Timing(float(first) if first else None, total)

    def weigh(self, conversations: list[tuple[tuple[Message, ...], str]]) -> list[float | None]:
        """The mean loss of a token of each reply, read off the log-probabilities of the prompt."""
        from graftwork.model.template import CannotProve

        rows = self.template.render_batch(conversations)
        good = [(place, row) for place, row in enumerate(rows) if not isinstance(row, CannotProve)]
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        losses: list[float | None] = [None] * len(rows)
        outputs = self._run([list(row.tokens) for _, row in good], params)
        for (place, row), output in zip(good, outputs, strict=True):
            told = output.prompt_logprobs
            reply = range(row.trained_from, len(row.tokens))
            losses[place] = -sum(told[at][row.tokens[at]].logprob for at in reply) / len(reply)
        return losses

    def peak_memory_gib(self) -> float:
        """What is taken on the card: the engine works in a process of its own."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return float((total - free) / 2**30)

    def _ask(self, prompts: list[list[int]], *, temperature: float, seed: int) -> list[Reply]:
        return [
            self._reply(output.outputs[0]) for output in self._run(prompts, self._params(temperature, seed))
        ]

    def _run(self, prompts: list[list[int]], params: Any) -> Sequence[Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Sequence[Any] = self._engine.generate(asked, params, lora_request=self._lora, use_tqdm=False)
        return outputs

    def _params(self, temperature: float, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=temperature,
            top_p=self._job.top_p if temperature > 0 else 1.0,
            seed=seed if temperature > 0 else None,
            max_tokens=self._job.max_new_tokens,
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
