"""The embedded engine: a model in this process, on the CPU or a GPU.

Input: an EngineSource. Output: answers, the time of one request, the loss of a given reply. The base is
loaded as it is served: in the device's precision and never quantized, whatever the adapter was trained on.
Where a GPU has no room for a batch, fewer of its rows run at once.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graftwork.engines.interface import (
    DecodingSettings,
    EngineFacts,
    EngineReply,
    EngineSource,
    OnToken,
    RenderedPrompt,
    Timing,
)
from graftwork.process.machine import peak_memory_gib
from graftwork.records.base import GIB
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.interaction import Message

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.generate.generator import Decoder, Generated, Sampling

EMBEDDED = "graftwork"
"""The name of this engine in jobs and reports."""
REVISION = 5
"""Incremented whenever the same weights may answer differently: answers of another revision are not
reused.
"""
SCORED_TOGETHER = 4
"""Rows whose losses are computed at once: each holds a row of the vocabulary for every token."""


def choose_device(setting: Literal["auto", "cpu", "cuda"], *, has_gpu: Callable[[], bool]) -> str:
    """Choose where the model computes: on the GPU if there is one, unless `setting` says otherwise."""
    if setting == "cpu" or (setting == "auto" and not has_gpu()):
        return "cpu"
    if not has_gpu():
        raise EnvironmentFailure(
            "there is no GPU to serve on",
            why="`serve.engine.device` is cuda, but torch finds no GPU",
            fix="set it to auto or cpu, or install a torch that supports this GPU",
            where="serve.engine.device",
        )
    return "cuda"


def precision_on(device: str) -> str:
    """float32 on a CPU; on a GPU bfloat16 if the hardware supports it."""
    if not device.startswith("cuda"):
        return "float32"
    import torch

    if not torch.cuda.is_available():
        return "float32"
    major, _ = torch.cuda.get_device_capability(device)
    return "bfloat16" if major >= 8 else "float16"


class EmbeddedEngine:
    """The base and any number of adapters, one of which is active at a time."""

    def __init__(self, source: EngineSource, *, template: "ChatTemplate | None" = None) -> None:
        import torch

        from graftwork.model.chat.template import ChatTemplate
        from graftwork.model.generate.generator import Generator
        from graftwork.model.load import load_base
        from graftwork.model.threads import guard_spinning, use_threads

        threads = use_threads(source.threads)
        guard_spinning(threads)
        on_gpu = source.device.startswith("cuda") and torch.cuda.is_available()
        self._device = source.device if on_gpu else "cpu"
        dtype = source.precision if on_gpu else "float32"
        self._model = load_base(source.base_folder, dtype=dtype, device=self._device)
        self._adapters: tuple[str, ...] = ()
        self._rows = source.rows
        self.template = template or ChatTemplate.from_folder(source.base_folder, reasoning=source.reasoning)
        self._generator = Generator(self._model, stop_tokens=[self.template.eos], recorded=on_gpu)
        if source.rows is not None:
            self._generator.decoder.slots = source.rows
        self._peak_of_one = 0
        for name, folder in source.adapters.items():
            self.load_adapter(name, folder)
        self.facts = EngineFacts(
            name=EMBEDDED,
            precision=dtype,
            fingerprint=source.fingerprint,
            details={
                "engine": EMBEDDED,
                "device": torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
                "base_as": f"{dtype}, not quantized",
                "threads": None if on_gpu else threads,
            },
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._adapters

    def load_adapter(self, name: str, folder: Path) -> None:
        """Attach one more adapter. No request may run meanwhile."""
        from graftwork.model.adapters.peft import activate, load_adapter

        load_adapter(self._model, folder, name=name)
        activate(self._model, None)
        self._generator.decoder.forget_adapters()
        self._peak_of_one = 0  # one more adapter, another peak
        self._adapters = (*self._adapters, name)

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on recording passes on a GPU so far."""
        return self._generator.decoder.recording_seconds

    @property
    def decoder(self) -> "Decoder":
        """For callers that submit requests one by one, as `graft serve` does."""
        return self._generator.decoder

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
        token_lists = [prompt.tokens for prompt in prompts]
        replies = self._generate_fitting(token_lists, _sampling(decoding), on_token, adapter)
        return [
            EngineReply(
                self.template.decode(list(reply.tokens)), len(reply.tokens), len(tokens), reply.finish_reason
            )
            for tokens, reply in zip(token_lists, replies, strict=True)
        ]

    def time_one(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Timing:
        first: list[float] = []
        if self._device != "cpu" and not self._peak_of_one:
            # What batches left on the GPU is not part of the first timed request, and its passes are recorded
            # before any is timed.
            import torch

            self._generator.decoder.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._generator.generate([prompt.tokens], _sampling(DecodingSettings(2)), adapter=adapter)
        began = time.perf_counter()

        def hear(_row: int, _token: int) -> bool:
            if not first:
                first.append(time.perf_counter() - began)
            return True

        self._generator.generate([prompt.tokens], _sampling(decoding), hear, adapter=adapter)
        total = time.perf_counter() - began
        if self._device != "cpu":
            import torch

            self._peak_of_one = int(torch.cuda.max_memory_reserved(self._device))
        return Timing(first[0] if first else total, total)

    def reply_losses(
        self, conversations: Sequence[tuple[tuple[Message, ...], str]], *, adapter: str | None = None
    ) -> list[float | None]:
        from graftwork.model.adapters.peft import activate
        from graftwork.model.chat.renderer import CannotProve

        activate(self._model, adapter)
        rows: list[tuple[int, Sequence[int], int]] = []
        for index, row in enumerate(self.template.render_batch(list(conversations))):
            if not isinstance(row, CannotProve):
                rows.append((index, row.tokens, row.trained_from))
        losses: list[float | None] = [None] * len(conversations)
        for start in range(0, len(rows), SCORED_TOGETHER):
            batch = rows[start : start + SCORED_TOGETHER]
            for (index, _, _), loss in zip(batch, self._losses_of(batch), strict=True):
                losses[index] = loss
        return losses

    def close(self) -> None:
        """Close the engine. Its weights are freed with the object."""

    def peak_memory_gib(self) -> float:
        """Peak memory of this process; on a GPU, its memory while single requests were timed, or the size of
        the weights. Batches use all the memory there is, so their peak would describe the GPU rather than the
        model.
        """
        if self._device == "cpu":
            return peak_memory_gib()
        weights = sum(int(tensor.nbytes) for tensor in self._model.parameters())
        return max(self._peak_of_one, weights) / GIB

    def _losses_of(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> list[float]:
        import torch
        from torch.nn.functional import cross_entropy

        width = max(len(tokens) for _, tokens, _ in rows)
        # Only the replies' own places are scored: counted from the end of the longest row.
        scored = width - min(reply_start for _, _, reply_start in rows) + 1
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, (_, tokens, _) in enumerate(rows):
            ids[index, : len(tokens)] = torch.tensor(list(tokens))
            mask[index, : len(tokens)] = 1
        with torch.inference_mode():
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                logits_to_keep=scored,
                use_cache=False,
            )
        first = width - scored
        losses = []
        for index, (_, tokens, reply_start) in enumerate(rows):
            logits = output.logits[index, reply_start - 1 - first : len(tokens) - 1 - first].float()
            targets = ids[index, reply_start : len(tokens)].to(logits.device)
            losses.append(float(cross_entropy(logits, targets)))
        return losses

    def _generate_fitting(
        self, prompts: list[list[int]], sampling: "Sampling", on_token: OnToken | None, adapter: str | None
    ) -> "Sequence[Generated]":
        """On a GPU, generate as many rows at once as fit; after an out-of-memory error half as many."""
        decoder = self._generator.decoder
        most = self._rows or len(prompts)
        if self._device == "cpu":
            decoder.slots = most
            return self._generator.generate(prompts, sampling, on_token, adapter=adapter)
        import torch

        from graftwork.model.generate.scheduler import rows_that_fit

        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        fitting = rows_that_fit(
            self._model.config.get_text_config(decoder=True),
            prompt_tokens=max(map(len, prompts)),
            new_tokens=sampling.max_new_tokens,
            free_bytes=free + cached + decoder.held_bytes,
        )
        decoder.slots = min(fitting, most)
        while True:
            try:
                return self._generator.generate(prompts, sampling, on_token, adapter=adapter)
            except torch.cuda.OutOfMemoryError:
                if decoder.slots == 1:
                    raise
            decoder.slots = decoder.slots // 2
            torch.cuda.empty_cache()


def _sampling(decoding: DecodingSettings) -> "Sampling":
    from graftwork.model.generate.generator import Sampling

    return Sampling(
        max_new_tokens=decoding.max_new_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        seed=decoding.seed or 0,
        top_k=decoding.top_k,
    )
