"""A model of our own, asked in batches on the processor or a card.

In: an EvalJob. Out: answers, the time of one request, the loss of a recorded reply. The base is loaded as
it will be served: in the device's precision and never quantised, whatever the adapter was trained on. A
batch that a card has no room for is cut in halves. The only file of this stage that loads a model itself.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.inference.engine import Timing
from graftwork.inference.selection import OWN, settle
from graftwork.process.memory import peak_memory_gib
from graftwork.records.interaction import Message
from graftwork.records.report import EvalJob
from graftwork.records.units import GIB

if TYPE_CHECKING:
    from graftwork.model.generate import Generated, OnToken, Sampling

WEIGHED_TOGETHER = 4
"""Rows whose losses are computed at once: each holds a row of the vocabulary for every token."""


class OwnModel:
    """The base, with the job's adapter acting where it names one."""

    def __init__(self, job: EvalJob) -> None:
        import torch

        from graftwork.model.adapter import load_adapter
        from graftwork.model.generate import Generator
        from graftwork.model.load import load_base
        from graftwork.model.template import Template
        from graftwork.model.threads import guard_spinning, use_threads

        self._job = job
        threads = use_threads(job.threads)
        guard_spinning(threads)
        on_card = job.device.startswith("cuda") and torch.cuda.is_available()
        self._device = job.device if on_card else "cpu"
        dtype = settle(job).precision if on_card else "float32"
        self._model = load_base(Path(job.base_folder), dtype=dtype, device=self._device)
        if job.adapter_folder is not None:
            load_adapter(self._model, Path(job.adapter_folder))
        self.template = Template.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        stop = [self.template.eos]
        self._generator = Generator(self._model, stop_tokens=stop, recorded=on_card)
        # Single requests are timed as `graft serve` answers them: it changes adapters and records nothing.
        self._single = Generator(self._model, stop_tokens=stop)
        self._peak_of_one = 0
        self.on_token: OnToken | None = None
        """Hears every token of a batch while it is written; single requests are timed without it."""
        self.described: dict[str, Any] = {
            "engine": OWN,
            "device": torch.cuda.get_device_name(self._device) if on_card else "cpu",
            "base_as": f"{dtype}, not quantised",
            "threads": None if on_card else threads,
        }

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load another adapter beside the base, to be chosen by `act_as`."""
        from graftwork.model.adapter import load_adapter

        load_adapter(self._model, folder, name=name)

    def act_as(self, name: str | None) -> None:
        """Answer with the adapter of this name, or as the base."""
        from graftwork.model.adapter import activate

        activate(self._model, name)

    def generate(self, prompts: list[list[int]]) -> "Sequence[Generated]":
        return self._fitted(prompts, self._sampling(seed=0, temperature=0.0))

    def sample(self, prompts: list[list[int]], seed: int) -> "Sequence[Generated]":
        return self._fitted(prompts, self._sampling(seed=seed, temperature=self._job.temperature))

    def time_one(self, prompt: list[int]) -> Timing:
        """One request alone, heard token by token."""
        first: list[float] = []
        self._make_room_for_one()
        began = time.perf_counter()

        def hear(_row: int, _token: int) -> bool:
            if not first:
                first.append(time.perf_counter() - began)
            return True

        sampling = self._sampling(seed=self._job.seed, temperature=self._job.temperature)
        self._single.generate([prompt], sampling, on_token=hear)
        total = time.perf_counter() - began
        self._note_peak_of_one()
        return Timing(first[0] if first else total, total)

    def weigh(self, conversations: list[tuple[tuple[Message, ...], str]]) -> list[float | None]:
        """The mean loss of a token of each reply, its end of turn included; None for one that is refused."""
        from graftwork.model.template import CannotProve

        rows: list[tuple[int, Sequence[int], int]] = []
        for place, row in enumerate(self.template.render_batch(conversations)):
            if not isinstance(row, CannotProve):
                rows.append((place, row.tokens, row.trained_from))
        losses: list[float | None] = [None] * len(conversations)
        for start in range(0, len(rows), WEIGHED_TOGETHER):
            some = rows[start : start + WEIGHED_TOGETHER]
            for (place, _, _), loss in zip(some, self._weigh_some(some), strict=True):
                losses[place] = loss
        return losses

    def peak_memory_gib(self) -> float:
        """Of this process; on a card of its memory while single requests were timed, else of the weights.

        Batches there are as large as there is room: their peak would say more of the card than of the model.
        """
        if self._device == "cpu":
            return peak_memory_gib()
        weights = sum(int(tensor.nbytes) for tensor in self._model.parameters())
        return max(self._peak_of_one, weights) / GIB

    def _make_room_for_one(self) -> None:
        """Before the first timed request: what batches left on the card is no part of it."""
        if self._device == "cpu" or self._peak_of_one:
            return
        import torch

        self._generator.forget_recording()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def _note_peak_of_one(self) -> None:
        if self._device != "cpu":
            import torch

            self._peak_of_one = int(torch.cuda.max_memory_reserved(self._device))

    def _weigh_some(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> list[float]:
        import torch
        from torch.nn.functional import cross_entropy

        width = max(len(tokens) for _, tokens, _ in rows)
        # Only the replies' own places are scored: counted from the end of the longest row.
        scored = width - min(begin for _, _, begin in rows) + 1
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, (_, tokens, _) in enumerate(rows):
            ids[place, : len(tokens)] = torch.tensor(list(tokens))
            mask[place, : len(tokens)] = 1
        with torch.inference_mode():
            output = self._model(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                logits_to_keep=scored,
                use_cache=False,
            )
        first = width - scored
        losses = []
        for place, (_, tokens, begin) in enumerate(rows):
            logits = output.logits[place, begin - 1 - first : len(tokens) - 1 - first].float()
            wanted = ids[place, begin : len(tokens)].to(logits.device)
            losses.append(float(cross_entropy(logits, wanted)))
        return losses

    def _fitted(self, prompts: list[list[int]], sampling: "Sampling") -> "Sequence[Generated]":
        """On a card, no more rows at once than it has room for."""
        if self._device == "cpu":
            return self._generator.generate(prompts, sampling, self.on_token)
        import torch

        from graftwork.model.batch_room import rows_with_room

        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        rows = rows_with_room(
            self._model.config.get_text_config(decoder=True),
            prompt_tokens=max(map(len, prompts)),
            new_tokens=sampling.max_new_tokens,
            free_bytes=free + held + self._generator.held_bytes,
        )
        said: list[Generated] = []
        for start in range(0, len(prompts), rows):
            said += self._halved(prompts[start : start + rows], replace(sampling, first_row=start))
        return said

    def _halved(self, prompts: list[list[int]], sampling: "Sampling") -> "Sequence[Generated]":
        import torch

        try:
            return self._generator.generate(prompts, sampling, self._hearing(from_row=sampling.first_row))
        except torch.cuda.OutOfMemoryError:
            if len(prompts) == 1:
                raise
        self._generator.forget_recording()
        torch.cuda.empty_cache()
        middle = len(prompts) // 2
        behind = replace(sampling, first_row=sampling.first_row + middle)
        return [*self._halved(prompts[:middle], sampling), *self._halved(prompts[middle:], behind)]

    def _hearing(self, *, from_row: int) -> "OnToken | None":
        """Rows of a part of a batch, told by their place in the whole."""
        told = self.on_token
        return None if told is None else lambda row, token: told(from_row + row, token)

    def _sampling(self, *, seed: int, temperature: float) -> "Sampling":
        from graftwork.model.generate import Sampling

        return Sampling(
            max_new_tokens=self._job.max_new_tokens, temperature=temperature, top_p=self._job.top_p, seed=seed
        )
