"""Preparing data, ours beside TRL's and beside the tokenizer alone: rows a second.

The same rows, tokenizer and length go through TRL's own preparation (template, tokenise, mask,
pack), through ours (template, tokenise, prove the mask, pack), each with two processes, and as
rendered text through `encode_batch_fast` with two threads. Rounds are interleaved, so that a busy
machine is equally unfair to each; figures are medians. Before the clock runs: TRL's trainer is made
and our worker processes are started, with nothing in their memory. Both end with a file on disk.

TRL is given prompt and completion, its documented way to train on replies alone: it refuses the
template of this base for a mask by the template.

Run: `python benchmarks/data.py [--rows N] [--rounds N] [--no-trl] [--json]`. TRL's column needs
`pip install trl datasets`; without it the column is left out.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from graftwork.data.render.dataset import pack_rows
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.renderer import CannotProve
from graftwork.model.chat.template import ChatTemplate
from graftwork.records.interaction import Message

LENGTH = 2048
PROCESSES = 2
CHUNK = 250
SYSTEM = "You are the assistant of a nursery for rare plants. Answer from the notes below, as JSON.\n\n"


class Corpus(NamedTuple):
    """Rows as (system, user, reply)."""

    name: str
    rows: list[tuple[str, str, str]]


# The rows


class Writer:
    """Text as logs hold it: words by Zipf's law out of many, numbers, code, JSON.

    The frequent words are those of the tokenizer's vocabulary, so that text has about as many words
    for its tokens as real text; behind them come made-up ones.
    """

    def __init__(self, seed: int, *, common: list[str], beyond_ascii: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._beyond = beyond_ascii
        syllables = ["".join(pair) for pair in itertools.product("bcdfghlmnprstvwz", "aeiou")]
        endings = ["", "", "s", "ed", "ing", "er", "ly", "tion"]
        pick = self._random.choice
        rare = [
            "".join(pick(syllables) for _ in range(pick((2, 3, 4)))) + pick(endings) for _ in range(40_000)
        ]
        self._words = common + rare
        weights = [1 / (rank + 2.7) for rank in range(len(self._words))]
        self._cumulative = list(itertools.accumulate(weights))

    def words(self, count: int) -> list[str]:
        return self._random.choices(self._words, cum_weights=self._cumulative, k=count)

    def sentence(self) -> str:
        words = self.words(self._random.randint(5, 18))
        if self._random.random() < 0.25:
            words.insert(len(words) // 2, str(self._random.randint(0, 10 ** self._random.randint(1, 7))))
        if self._random.random() < 0.15:
            words[-1] = f"{self._random.uniform(0, 500):.2f}"
        if self._random.random() < self._beyond:
            words[0] = self._random.choice(("Größe", "naïve", "“quoted”", "déjà", "–", "植物", "✓"))
        text = " ".join(words)
        return (
            text[0].upper() + text[1:] + self._random.choice((". ", ". ", ", ", "? ", ": ", ".\n", ".\n\n- "))
        )

    def code(self) -> str:
        a, b, c = self.words(3)
        number = self._random.randint(0, 9999)
        return (
            f"```python\ndef {a}_{b}({c}: int = {number}) -> dict:\n    if {c} > {number % 97}:\n"
            f'        return {{"{a}": {c} * {number % 13}}}\n    raise ValueError(f"{b} {{{c}!r}}")\n```\n'
        )

    def record(self) -> str:
        keys = self.words(4)
        values = [self._random.randint(0, 10**6), *self.words(2), [self._random.random(), None, True]]
        return json.dumps(dict(zip(keys, values, strict=True)), indent=self._random.choice((None, 2))) + "\n"

    def text(self, characters: int) -> str:
        parts: list[str] = []
        size = 0
        while size < characters:
            kind = self._random.random()
            part = self.code() if kind < 0.06 else self.record() if kind < 0.12 else self.sentence()
            parts.append(part)
            size += len(part)
        return "".join(parts).strip()

    def row(self, system: str, *, shorter: float = 1.0) -> tuple[str, str, str]:
        return system, self.text(int(650 * shorter)), self.text(int(600 * shorter))


def write_corpora(rows: int, *, common: list[str]) -> list[Corpus]:
    """About 520 tokens a row each."""
    different = Writer(1, common=common)
    repeated = Writer(2, common=common)
    mixed = Writer(3, common=common, beyond_ascii=0.05)
    prompt = SYSTEM + repeated.text(900)
    return [
        Corpus("all rows different", [different.row(different.text(350)) for _ in range(rows)]),
        Corpus("one system prompt", [repeated.row(prompt, shorter=0.6) for _ in range(rows)]),
        Corpus("different, beyond ASCII", [mixed.row(mixed.text(350)) for _ in range(rows)]),
    ]


def find_common_words(base_folder: Path) -> list[str]:
    """The words that are one token, the most frequent first."""
    vocabulary = json.loads((base_folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = (
        token[1:] for token, _ in sorted(vocabulary.items(), key=lambda item: item[1]) if token[0] == "Ġ"
    )
    return [word for word in words if word.isascii() and word.isalpha()]


# The tokenizer alone


def render_texts(corpus: Corpus, tokenizer: Any) -> list[str]:
    return [
        tokenizer.apply_chat_template([*_turns(row[:2]), _turn("assistant", row[2])], tokenize=False)
        for row in corpus.rows
    ]


def run_raw(texts: list[str], tokenizer: Any) -> float:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    began = time.perf_counter()
    tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - began


# TRL


def make_trl_rows(corpus: Corpus) -> Any:
    from datasets import Dataset

    rows = [{"prompt": _turns(row[:2]), "completion": [_turn("assistant", row[2])]} for row in corpus.rows]
    return Dataset.from_list(rows)


def make_trainer(tokenizer: Any, folder: str) -> Any:
    """A trainer with a model of no size: only its preparation of data is wanted."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
    )
    settings = SFTConfig(
        output_dir=folder,
        max_length=LENGTH,
        packing=True,
        packing_strategy="bfd",
        completion_only_loss=True,
        dataset_num_proc=PROCESSES,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    one = make_trl_rows(Corpus("one", [("s", "u", "r")] * 4))
    return SFTTrainer(LlamaForCausalLM(config), args=settings, train_dataset=one, processing_class=tokenizer)


def run_trl(trainer: Any, rows: Any, tokenizer: Any) -> float:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.perf_counter()
    packed = trainer._prepare_dataset(
        rows, tokenizer, trainer.args, packing=True, formatting_func=None, dataset_name="train"
    )
    seconds = time.perf_counter() - began
    assert len(packed)
    return seconds


# Ours

_template: ChatTemplate | None = None


def begin(template: ChatTemplate, ready: Any) -> None:
    """Called once in each worker process."""
    global _template  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _template = template
    template.render_batch(
        [((Message(role="user", content="x"),), "y")]
    )  # loads what is loaded when first used
    ready.wait()


def render_chunk(file: str, start: int, count: int) -> tuple[bytes, bytes, bytes]:
    """Tokens, lengths and places where training begins, of the rows from `start` on."""
    assert _template is not None
    with pa.memory_map(file) as source:
        rows = pa.ipc.open_file(source).read_all().slice(start, count).to_pydict()
    conversations = [
        ((Message(role="system", content=system), Message(role="user", content=user)), reply)
        for system, user, reply in zip(rows["system"], rows["user"], rows["reply"], strict=True)
    ]
    made = [row for row in _template.render_batch(conversations) if not isinstance(row, CannotProve)]
    assert len(made) == count
    lengths = np.array([len(row.tokens) for row in made], dtype=np.int32)
    trained_from = np.array([row.trained_from for row in made], dtype=np.int32)
    return b"".join(row.tokens for row in made), lengths.tobytes(), trained_from.tobytes()


@contextmanager
def workers(template: ChatTemplate) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(PROCESSES + 1)
    with ProcessPoolExecutor(
        PROCESSES, mp_context=context, initializer=begin, initargs=(template, ready)
    ) as pool:
        waiting = [pool.submit(time.sleep, 0.2) for _ in range(PROCESSES)]
        ready.wait()
        for one in waiting:
            one.result()
        yield pool


def run_ours(template: ChatTemplate, file: Path, count: int) -> tuple[float, int]:
    """The seconds, and the number of tokens."""
    with workers(template) as pool:
        began = time.perf_counter()
        starts = range(0, count, CHUNK)
        sizes = [min(CHUNK, count - start) for start in starts]
        chunks = list(pool.map(render_chunk, itertools.repeat(str(file)), starts, sizes))
        lengths = np.frombuffer(b"".join(chunk[1] for chunk in chunks), dtype=np.int32)
        trained_from = np.frombuffer(b"".join(chunk[2] for chunk in chunks), dtype=np.int32)
        values = pa.array(np.frombuffer(b"".join(chunk[0] for chunk in chunks), dtype=np.int32))
        borders = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        order_of_rows, ends = pack_rows(lengths, length=LENGTH)
        order = pa.array(order_of_rows)
        rows = pa.LargeListArray.from_arrays(pa.array(borders), values).take(order)
        table = pa.table({"tokens": rows, "trained_from": pa.array(trained_from).take(order)})
        _write(table, file.with_suffix(".packed"))
        _write(pa.table({"boundaries": ends}), file.with_suffix(".sequences"))
        return time.perf_counter() - began, int(lengths.sum())


def _write(table: pa.Table, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


# Side by side


def compare(rows: int, rounds: int, *, with_trl: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    base = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    template = ChatTemplate.from_folder(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    has_trl = with_trl and find_spec("trl") is not None and find_spec("datasets") is not None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        trainer = make_trainer(tokenizer, folder) if has_trl else None
        for corpus in write_corpora(rows, common=find_common_words(base)):
            results[corpus.name] = _compare(corpus, template, tokenizer, trainer, Path(folder), rounds=rounds)
    load = os.getloadavg()[0]
    return {"rows": rows, "rounds": rounds, "load": load, "trl": has_trl, "corpora": results}


def _compare(
    corpus: Corpus, template: ChatTemplate, tokenizer: Any, trainer: Any, folder: Path, *, rounds: int
) -> dict[str, float]:
    count = len(corpus.rows)
    file = folder / "rows.arrow"
    columns = zip(*corpus.rows, strict=True)
    _write(pa.table(dict(zip(("system", "user", "reply"), map(pa.array, columns), strict=True))), file)
    texts = render_texts(corpus, tokenizer)
    trl_rows = make_trl_rows(corpus) if trainer is not None else None
    seconds: dict[str, list[float]] = {"raw": [], "ours": [], "trl": []}
    tokens = 0
    for _ in range(rounds):
        seconds["raw"].append(run_raw(texts, tokenizer))
        taken, tokens = run_ours(template, file, count)
        seconds["ours"].append(taken)
        if trainer is not None:
            seconds["trl"].append(run_trl(trainer, trl_rows, tokenizer))
    result = {name: count / statistics.median(times) for name, times in seconds.items() if times}
    return {**result, "tokens_per_row": tokens / count}


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['rows']} rows, {PROCESSES} processes, sequences of {LENGTH} tokens, medians of "
        f"{result['rounds']} rounds, load {result['load']:.1f}; rows/s"
    )
    print(f"{'':<26}{'tokens':>8}{'raw':>8}{'ours':>8}{'TRL':>8}{'to raw':>9}{'to TRL':>9}")
    for name, row in result["corpora"].items():
        trl = f"{row['trl']:>8.0f}" if "trl" in row else f"{'-':>8}"
        to_trl = f"{row['ours'] / row['trl']:>8.2f}x" if "trl" in row else f"{'-':>9}"
        print(
            f"{name:<26}{row['tokens_per_row']:>8.0f}{row['raw']:>8.0f}{row['ours']:>8.0f}{trl}"
            f"{row['ours'] / row['raw']:>8.2f}x{to_trl}"
        )
    if not result["trl"]:
        print("TRL was left out, or is not installed: pip install trl datasets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out: it takes most of the time")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = compare(arguments.rows, arguments.rounds, with_trl=not arguments.no_trl)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _turns(contents: tuple[str, ...]) -> list[dict[str, str]]:
    return [_turn(role, content) for role, content in zip(("system", "user"), contents, strict=True)]


if __name__ == "__main__":
    main()
