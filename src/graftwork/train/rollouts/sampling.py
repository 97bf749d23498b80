"""Answers by the model in training, or by an OpenAI-compatible endpoint (vLLM) with the adapter in training.

Input: prompts as tokens. Output: answers with the log-probability of each token. The prompt of a group is
read once; an answer's random numbers depend on seed, batch, prompt and answer only. A GPU replays recorded
passes. An endpoint's kernels are not the trainer's: tokens where both disagree are left out
(`correct_mismatch`).
"""

import json
import math
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.process.http_client import HttpClient, NoAnswer, Retries, may_pass, retry_after
from graftwork.process.machine import is_exhaustion, release_free_memory
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.text.redact import hide
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.rollouts.episodes import SampledAnswer
from graftwork.train.rollouts.measures import seed_of
from graftwork.train.settings import RolloutEndpointSettings, RolloutSettings

if TYPE_CHECKING:
    from graftwork.model.generate.decoder import TokenPass
    from graftwork.model.generate.generator import Decoder
    from graftwork.model.generate.sampling import GenerationRequest


class AskedPrompt(NamedTuple):
    id: str
    tokens: list[int]
    decoy: bool = False


class AskedReply(NamedTuple):
    """One reply to write after these tokens."""

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


class SamplingPasses(NamedTuple):
    """How the model's passes run while it answers."""

    prompts_at_once: int | None = None
    """Prompts answered together; all of a batch without it."""
    recorded: bool = False
    token_pass: "TokenPass | None" = None


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
        passes: SamplingPasses = SamplingPasses(),  # noqa: B008
    ) -> None:
        self._model = model
        self._at_once = passes.prompts_at_once or settings.prompts
        self._recorded = passes.recorded
        self._token_pass = passes.token_pass
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
        requests = [
            [
                AskedReply(
                    prompt.tokens,
                    settings.max_completion_length,
                    seed_of(self._seed, batch, prompt.id, answer),
                )
                for answer in range(settings.num_generations)
            ]
            for prompt in prompts
        ]
        reply_groups = self.write(requests, progress=progress)
        return [
            SampledAnswer(
                prompt=prompt.id,
                answer=number,
                tokens=reply.tokens,
                logprobs=reply.logprobs,
                text=self._decode(list(reply.spoken)),
                truncated=not reply.ended,
                decoy=prompt.decoy,
            )
            for prompt, replies in zip(prompts, reply_groups, strict=True)
            for number, reply in enumerate(replies)
        ]

    def prepare(self, batch: int) -> None:
        """Nothing to do: the adapter in training generates the answers."""

    def write(
        self, groups: Sequence[Sequence[AskedReply]], *, progress: Callable[[], None]
    ) -> list[list[WrittenReply]]:
        """Generate replies with the live adapter; the replies of a group share their prompt."""
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
            requests = None
            try:
                try:
                    requests = self._write(groups, adapter, progress)
                except Exception as error:
                    if not (self._recorded and is_exhaustion(error)):
                        raise
                if requests is None:
                    # Not in the handler: the error refers to the tensors of the failed pass.
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
        requests: list[list[GenerationRequest]] = []
        # Decoys come on top of the prompts that were planned for: they are answered after them.
        at_once = self._at_once
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
        longest = max(len(request.tokens) + request.max_tokens for group in groups for request in group)
        decoder.reserve(min(at_once, len(groups)) * settings.num_generations, longest)
        for number, group in enumerate(groups, 1):
            requests.append([])
            for request in group:
                # The loss is that of answers sampled at temperature 1.
                sampling = Sampling(max_new_tokens=request.max_tokens, temperature=1.0, seed=request.seed)
                options = TokenOptions(logprobs=0)
                requests[-1].append(
                    GenerationRequest(request.tokens, sampling, adapter=adapter, options=options)
                )
                decoder.submit(requests[-1][-1])
            if not self._recorded or len({tuple(request.tokens) for request in group}) > 1:
                # The group that joins alone reads what its answers share once. A GPU reads the prompts of
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
        return requests

    def _give_back(self) -> None:
        """Free the decoder's cache now; otherwise it would wait for the garbage collector, and batches of
        them would pile up.
        """
        if self._decoder is not None:
            self._decoder.reset()
            self._decoder = None


ATTEMPTS = 3
ANSWER_SECONDS = 300.0
LONGEST_ANSWER = 64 * 2**20
WHERE = "train.rollouts.endpoint"
TOKEN_MARK = "token_id:"
"""vLLM's prefix of a token if ids were requested."""

SaveAdapter = Callable[[Path], None]


class EndpointSampler(RolloutSampler):
    """Like the sampler over the live adapter, with an endpoint that generates the replies."""

    def __init__(
        self,
        endpoint: RolloutEndpointSettings,
        *,
        settings: RolloutSettings,
        seed: int,
        end_of_turn: int,
        decode: Callable[[list[int]], str],
        folder: Path,
        save: SaveAdapter | None,
    ) -> None:
        super().__init__(None, settings=settings, seed=seed, end_of_turn=end_of_turn, decode=decode)
        self._endpoint = endpoint
        self._folder, self._save = folder, save
        self._client = HttpClient(longest=LONGEST_ANSWER)
        self._served = endpoint.model

    def prepare(self, batch: int) -> None:
        """Load the current adapter into the endpoint, under a new name, so that cached prefixes of the old
        one are not used.
        """
        if self._save is None:
            return
        # A resumed run names it differently: the server may still have the one from before.
        name = f"graft-{self._folder.name}-{batch}-{os.getpid()}"
        folder = self._folder / "endpoint" / name
        self._save(folder)
        self._post("load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        if self._served != self._endpoint.model:
            self._post("unload_lora_adapter", {"lora_name": self._served})
            shutil.rmtree(folder.with_name(self._served), ignore_errors=True)
        self._served = name

    def write(
        self, groups: Sequence[Sequence[AskedReply]], *, progress: Callable[[], None]
    ) -> list[list[WrittenReply]]:
        def ask(request: AskedReply) -> WrittenReply:
            body = {
                "model": self._served,
                "prompt": request.tokens,
                "max_tokens": request.max_tokens,
                "temperature": 1.0,
                "top_p": 1.0,
                # A server may have other defaults from the model's folder: the trainer knows none of these.
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                # The trainer's sampler ends a reply at one token only.
                "ignore_eos": True,
                "seed": request.seed % 2**31,
                "logprobs": 0,
                "stop_token_ids": [self._end],
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            return read_choice(json.loads(self._post("completions", body)), end=self._end)

        with ThreadPoolExecutor(self._endpoint.concurrency, thread_name_prefix="rollouts") as pool:
            replies = []
            for reply in pool.map(ask, [request for group in groups for request in group]):
                replies.append(reply)
                progress()
        in_order = iter(replies)
        return [[next(in_order) for _ in group] for group in groups]

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers, key = {"Content-Type": "application/json"}, ""
        if self._endpoint.api_key_env:
            key = os.environ.get(self._endpoint.api_key_env, "")
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self._endpoint.url.rstrip('/')}/{path}"
        retries, content = Retries(attempts=ATTEMPTS), json.dumps(body).encode()
        while True:
            asked_pause = None
            try:
                request = urllib.request.Request(url, content, headers)
                with self._client.send(request, seconds=ANSWER_SECONDS) as answer:
                    given = answer.read()
            except NoAnswer as error:
                may_come, why = True, str(error)
            else:
                if answer.status < 300:
                    return given
                may_come, asked_pause = may_pass(answer.status), retry_after(answer.header("Retry-After"))
                why = f"status {answer.status}: {given[:200].decode(errors='replace')}"
            pause = retries.after_failure(asked=asked_pause) if may_come else None
            if pause is None:
                raise EnvironmentFailure(
                    f"the endpoint {self._endpoint.url} does not answer /{path}",
                    why=hide(why, [key]),
                    fix="check its URL, model and log; `graft train` resumes the run where it stopped",
                    where=WHERE,
                )
            time.sleep(pause)


def read_choice(body: Any, *, end: int) -> WrittenReply:
    """The tokens and log-probabilities of an answer; UserError if the endpoint gives none."""
    try:
        choice = body["choices"][0]
        noted = choice["logprobs"]
        tokens = choice.get("token_ids") or [int(token.removeprefix(TOKEN_MARK)) for token in noted["tokens"]]
        logprobs = [float(value) for value in noted["token_logprobs"]]
        ended = choice["finish_reason"] == "stop"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _no_tokens("its answer has no token ids with log-probabilities") from None
    if len(tokens) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        raise _no_tokens("token ids and log-probabilities do not belong together")
    if ended and tokens[-1:] != [end]:
        raise _no_tokens("it leaves the end of turn out of its answer")
    return WrittenReply(tuple(tokens), tuple(logprobs), ended)


def _no_tokens(why: str) -> UserError:
    return UserError(
        "the endpoint cannot serve rollouts",
        why=f"{why}; text alone would have to be encoded again, which changes tokens",
        fix="use vLLM with /v1/completions (`return_token_ids`), or leave `endpoint` out",
        where=WHERE,
    )


MOST_APART = 3.0
"""Tokens whose probability differs by more than this factor between trainer and server are left out."""


def correct_mismatch(
    rows: Sequence[TrainingSample],
    sampled: Sequence[Sequence[float]],
    now: Sequence[Sequence[float]],
    *,
    most: float,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Weight each token by the trainer's probability over the sampler's. Tokens above `most` or below its
    inverse are left out, as are tokens that were not sampled. Returns rows and metrics. Pure.
    """
    corrected, gaps, left_out = [], [], 0
    for row, theirs, ours in zip(rows, sampled, now, strict=True):
        factors = []
        row_factors = row.factors or (1.0,) * len(theirs)
        for factor, sampler, trainer in zip(row_factors, theirs, ours, strict=True):
            if not factor:
                factors.append(0.0)
                continue
            gap = trainer - sampler
            gaps.append(gap)
            is_kept = abs(gap) <= math.log(most)
            left_out += not is_kept
            factors.append(factor * math.exp(gap) if is_kept else 0.0)
        corrected.append(row.model_copy(update={"factors": tuple(factors)}))
    bounded = [max(min(gap, 20.0), -20.0) for gap in gaps]
    measures = {
        "mismatch": fmean(map(abs, gaps)) if gaps else 0.0,
        "mismatch_kl": fmean(math.expm1(gap) - gap for gap in bounded) if gaps else 0.0,
        "masked": left_out / max(len(gaps), 1),
    }
    return corrected, measures
