"""Answers by the model in training: the live adapter's own tensors, no copy of any weight.

In: prompts as tokens. Out: answers with the log-probability of each token. The prompt of a group is read
once; an answer's random numbers depend on seed, batch, prompt and answer only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graftwork.train.objective_settings import RolloutSettings
from graftwork.train.rollouts.episodes import SampledAnswer
from graftwork.train.rollouts.groups import seed_of


class AskedPrompt(NamedTuple):
    id: str
    tokens: list[int]
    canary: bool = False


class RolloutSampler:
    """`decode` turns tokens into the text that rewards read."""

    def __init__(
        self,
        model: Any,
        *,
        settings: RolloutSettings,
        seed: int,
        end_of_turn: int,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._model = model
        self._settings = settings
        self._seed = seed
        self._end = end_of_turn
        self._decode = decode

    def sample(
        self, batch: int, prompts: Sequence[AskedPrompt], *, progress: Callable[[], None] = lambda: None
    ) -> list[SampledAnswer]:
        from graftwork.model.adapters.rows import active_adapter
        from graftwork.model.generate.constraint import TokenOptions
        from graftwork.model.generate.generator import Generator, Sampling
        from graftwork.model.generate.requests import GenerationRequest
        from graftwork.model.load import eval_mode

        settings = self._settings
        found: list[tuple[AskedPrompt, int, GenerationRequest]] = []
        with eval_mode(self._model):
            decoder = Generator(self._model, stop_tokens=[self._end]).decoder
            adapter = active_adapter(self._model)
            longest = max(len(prompt.tokens) for prompt in prompts)
            decoder.reserve(len(prompts) * settings.answers, longest + settings.max_tokens)
            for prompt in prompts:
                for answer in range(settings.answers):
                    sampling = Sampling(
                        max_new_tokens=settings.max_tokens,
                        temperature=settings.temperature,
                        seed=seed_of(self._seed, batch, prompt.id, answer),
                    )
                    request = GenerationRequest(
                        prompt.tokens, sampling, adapter=adapter, options=TokenOptions(logprobs=0)
                    )
                    found.append((prompt, answer, request))
                    decoder.submit(request)
                # The group that joins alone reads its prompt once.
                decoder.step()
                progress()
            while decoder.busy:
                decoder.step()
                progress()
        return [self._answer(prompt, number, request) for prompt, number, request in found]

    def _answer(self, prompt: AskedPrompt, number: int, request: Any) -> SampledAnswer:
        ended = request.result.finish_reason == "stop"
        tokens = [*request.result.tokens, self._end] if ended else request.result.tokens
        noted = [token.logprob for token in request.options.noted][: len(tokens)]
        return SampledAnswer(
            prompt=prompt.id,
            answer=number,
            tokens=tuple(tokens),
            logprobs=tuple(noted),
            text=self._decode(request.result.tokens),
            truncated=not ended,
            canary=prompt.canary,
        )
