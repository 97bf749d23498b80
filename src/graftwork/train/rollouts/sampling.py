"""Answers by the model in training: the live adapter's own tensors, no copy of any weight.

In: prompts as tokens. Out: answers with the log-probability of each token. The prompt of a group is read
once; an answer's random numbers depend on seed, batch, prompt and answer only. A card replays recorded
passes, which stay from batch to batch and read the adapter's latest weights.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.process.memory import is_exhaustion, release_free_memory
from graftwork.train.objective_settings import RolloutSettings
from graftwork.train.rollouts.episodes import SampledAnswer
from graftwork.train.rollouts.groups import seed_of

if TYPE_CHECKING:
    from graftwork.model.generate.decoder import TokenPass
    from graftwork.model.generate.generator import Decoder
    from graftwork.model.generate.sampling import GenerationRequest


class AskedPrompt(NamedTuple):
    id: str
    tokens: list[int]
    canary: bool = False


class AskedReply(NamedTuple):
    """One reply to write behind these tokens."""

    tokens: list[int]
    max_tokens: int
    seed: int


class WrittenReply(NamedTuple):
    """`tokens` ends with the end of turn if the reply `ended` by itself."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool

    @property
    def spoken(self) -> tuple[int, ...]:
        return self.tokens[:-1] if self.ended else self.tokens


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
        recorded: bool = False,
        token_pass: "TokenPass | None" = None,
    ) -> None:
        self._model = model
        self._recorded = recorded
        self._token_pass = token_pass
        self._decoder: Decoder | None = None
        self._settings = settings
        self._seed = seed
        self._end = end_of_turn
        self._decode = decode

    def sample(
        self, batch: int, prompts: Sequence[AskedPrompt], *, progress: Callable[[], None] = lambda: None
    ) -> list[SampledAnswer]:
        settings = self._settings
        self.prepare(batch)
        asked = [
            [
                AskedReply(prompt.tokens, settings.max_tokens, seed_of(self._seed, batch, prompt.id, answer))
                for answer in range(settings.answers)
            ]
            for prompt in prompts
        ]
        written = self.write(asked, progress=progress)
        return [
            SampledAnswer(
                prompt=prompt.id,
                answer=number,
                tokens=reply.tokens,
                logprobs=reply.logprobs,
                text=self._decode(list(reply.spoken)),
                truncated=not reply.ended,
                canary=prompt.canary,
            )
            for prompt, replies in zip(prompts, written, strict=True)
            for number, reply in enumerate(replies)
        ]

    def prepare(self, batch: int) -> None:
        """Nothing to do: the adapter in training is the one that writes."""

    def write(
        self, groups: Sequence[Sequence[AskedReply]], *, progress: Callable[[], None]
    ) -> list[list[WrittenReply]]:
        """Replies by the live adapter; the replies of a group share the beginning of their tokens."""
        from graftwork.model.adapters.lora import active_adapter
        from graftwork.model.adapters.peft import activate
        from graftwork.model.load import eval_mode

        def read(request: "GenerationRequest") -> WrittenReply:
            assert request.options is not None
            ended = request.result.finish_reason == "stop"
            tokens = [*request.result.tokens, self._end] if ended else request.result.tokens
            noted = [token.logprob for token in request.options.noted][: len(tokens)]
            return WrittenReply(tuple(tokens), tuple(noted), ended)

        adapter = active_adapter(self._model)
        with eval_mode(self._model):
            try:
                try:
                    requests = self._write(groups, adapter, progress)
                except Exception as error:
                    if not (self._recorded and is_exhaustion(error)):
                        raise
                    # Recorded passes keep their memory between batches, others give it back.
                    self._give_back()
                    self._recorded, self._token_pass = False, None
                    requests = self._write(groups, adapter, progress)
            except BaseException:
                self._give_back()
                raise
            finally:
                # Where each row has its own adapter, the model's acts no longer.
                activate(self._model, adapter)
        return [[read(request) for request in group] for group in requests]

    def _write(
        self, groups: Sequence[Sequence[AskedReply]], adapter: str | None, progress: Callable[[], None]
    ) -> "list[list[GenerationRequest]]":
        from graftwork.model.generate.generator import Sampling, open_decoder, use_grouped_attention
        from graftwork.model.generate.sampling import GenerationRequest, TokenOptions
        from graftwork.model.generate.scheduler import MOST_ROWS

        settings = self._settings
        # The activations of the last step: without this, the cache of answers comes on top of them.
        release_free_memory()
        found: list[list[GenerationRequest]] = []
        # Canaries come on top of the prompts that were planned for: they are answered behind them.
        at_once = settings.prompts_at_once or settings.prompts
        use_grouped_attention(self._model)
        if self._decoder is None:
            self._decoder = open_decoder(
                self._model,
                stop_tokens=[self._end],
                slots=MOST_ROWS,
                recorded=self._recorded,
                token_pass=self._token_pass,
            )
        decoder = self._decoder
        decoder.update_adapters()
        longest = max(len(asked.tokens) + asked.max_tokens for group in groups for asked in group)
        decoder.reserve(min(at_once, len(groups)) * settings.answers, longest)
        for number, group in enumerate(groups, 1):
            found.append([])
            for asked in group:
                # The loss is that of answers sampled at temperature 1.
                sampling = Sampling(max_new_tokens=asked.max_tokens, temperature=1.0, seed=asked.seed)
                options = TokenOptions(logprobs=0)
                found[-1].append(GenerationRequest(asked.tokens, sampling, adapter=adapter, options=options))
                decoder.submit(found[-1][-1])
            if not self._recorded or len({tuple(asked.tokens) for asked in group}) > 1:
                # The group that joins alone reads what its answers share once. A card reads the prompts of
                # all groups in one pass, where each group has a single one.
                decoder.step()
                progress()
            while decoder.busy and number % at_once == 0:
                decoder.step()
                progress()
        while decoder.busy:
            decoder.step()
            progress()
        if not self._recorded:
            self._give_back()
        return found

    def _give_back(self) -> None:
        """A decoder's cache would wait for the garbage collector, and batches of them would pile up."""
        if self._decoder is not None:
            self._decoder.reset()
            self._decoder = None
