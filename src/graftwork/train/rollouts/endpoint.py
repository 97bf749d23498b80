"""Answers from an OpenAI-compatible endpoint (vLLM) instead of the model in training.

In: prompts as tokens. Out: replies as tokens, with the log-probabilities of the endpoint. Its kernels and its
weights are not those of the trainer, so the trainer measures how far both are apart and leaves out tokens
where they disagree (`correct_mismatch`).
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
from typing import Any

from graftwork.process.http_client import HttpClient, NoAnswer, Retries, may_pass, retry_after
from graftwork.records.errors import EnvironmentLacks, UserMistake
from graftwork.text.messages import hide
from graftwork.train.objective_settings import RolloutEndpointSettings, RolloutSettings
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.rollouts.sampling import AskedReply, RolloutSampler, WrittenReply

ATTEMPTS = 3
LONGEST_ANSWER = 64 * 2**20
WHERE = "train.rollouts.endpoint"
TOKEN_MARK = "token_id:"
"""How vLLM names a token where it was asked for ids."""

SaveAdapter = Callable[[Path], None]


class EndpointSampler(RolloutSampler):
    """The same as the sampler over the live adapter, but for who writes the replies."""

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
        """Give the endpoint the adapter as it is now, under a name of its own: prefixes that the endpoint
        remembers belong to another name then."""
        if not self._endpoint.load_adapters or self._save is None:
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
        def ask(asked: AskedReply) -> WrittenReply:
            body = {
                "model": self._served,
                "prompt": asked.tokens,
                "max_tokens": asked.max_tokens,
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
                "seed": asked.seed % 2**31,
                "logprobs": 0,
                "stop_token_ids": [self._end],
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            return read_choice(json.loads(self._post("completions", body)), end=self._end)

        with ThreadPoolExecutor(self._endpoint.concurrency, thread_name_prefix="rollouts") as pool:
            replies = []
            for reply in pool.map(ask, [asked for group in groups for asked in group]):
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
                with self._client.send(request, seconds=self._endpoint.seconds) as answer:
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
                raise EnvironmentLacks(
                    f"the endpoint {self._endpoint.url} does not answer {path}",
                    why=hide(why, [key]),
                    fix="check its URL, model and log; `graft train` resumes the run where it stopped",
                    where=WHERE,
                )
            time.sleep(pause)


def read_choice(given: Any, *, end: int) -> WrittenReply:
    """The tokens and log-probabilities of an answer; UserMistake if the endpoint gives none."""
    try:
        choice = given["choices"][0]
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


def _no_tokens(why: str) -> UserMistake:
    return UserMistake(
        "the endpoint cannot serve rollouts",
        why=f"{why}; text alone would have to be encoded again, which changes tokens",
        fix="use vLLM with /v1/completions (`return_token_ids`), or leave `endpoint` out",
        where=WHERE,
    )


MOST_APART = 3.0
"""Tokens whose probability by trainer and server differs by more than this factor are left out."""


def correct_mismatch(
    rows: Sequence[TrainingSample],
    sampled: Sequence[Sequence[float]],
    now: Sequence[Sequence[float]],
    *,
    most: float,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Weigh each token by the trainer's probability over the sampler's. Tokens beyond `most` or below its
    inverse are left out, as are tokens that nobody sampled. Gives rows and measures. Pure."""
    corrected, gaps, left_out = [], [], 0
    for row, theirs, ours in zip(rows, sampled, now, strict=True):
        factors = []
        given = row.factors or (1.0,) * len(theirs)
        for factor, sampler, trainer in zip(given, theirs, ours, strict=True):
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
