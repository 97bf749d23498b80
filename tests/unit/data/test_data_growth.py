"""A log that grows costs what is new, and its dataset has the bytes of one that is prepared from nothing."""

import json
import random
import shutil

import numpy as np
import pytest
from data_rows import THINGS, WordRenderer, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus import build
from graftwork.data.corpus.store import PrefixCache
from graftwork.data.dedup import repeats
from graftwork.data.prepare import PrepareJob, prepare
from graftwork.data.settings import DataSettings

FILLERS = (
    "in the old hall",
    "by the north gate",
    "for the spring fair",
    "under the oak roof",
    "on the long wall",
)
ASKS = ("What does the {} cost", "Who made our {}", "Where can one borrow any {}", "When was the {} tuned")


def prepare_in(folder, log, **changes):
    text = "\n".join(log) + "\n"
    return prepare_text(folder, text.encode(), **changes)


def prepare_text(folder, text, **changes):
    (folder / "work").mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_bytes(text)
    chosen = {"logs": ("log.jsonl",), "validation": 0.2, "test": 0.3, **changes}
    job = PrepareJob(
        AuditContext(settings=DataSettings(**chosen)),
        base="base",
        base_fingerprint="f",
        renderer=WordRenderer(),
        work=folder / "work",
        out=folder / "out",
        root=folder,
    )
    [made] = prepare(job, processes=1).datasets
    return made.dataset.content_hash


def make_log(chance, rows):
    """Questions, with repeats, other replies to the same prompt, rows that differ in a word, bad lines."""
    log = []
    for number in range(rows):
        kind = chance.random()
        if log and kind < 0.1:
            log.append(chance.choice(log))
        elif log and kind < 0.25:
            log.append(chance.choice(log).replace(" the ", f" the {chance.choice(THINGS)} ", 1))
        elif kind < 0.28:
            log.append("{this is no JSON")
        else:
            thing, filler = chance.choice(THINGS), " ".join(chance.sample(FILLERS, 3))
            question = f"Sources:\n[1] The {thing} is kept {filler}.\n\n{chance.choice(ASKS).format(thing)}?"
            reply = chance.choice([f"Answer {number} on the {thing} {filler}.", f"The {thing} {filler}."])
            log.append(json.dumps(chat(question, reply, status="success")))
    return log


@given(seed=st.integers(0, 2**32), conflicts=st.sampled_from(["keep_last", "keep_all", "drop_all"]))
@settings(max_examples=4, deadline=None)
def test_a_grown_log_has_the_dataset_of_one_prepared_from_nothing(tmp_path_factory, seed, conflicts):
    chance = random.Random(seed)
    log = make_log(chance, chance.randint(50, 100))
    folder = tmp_path_factory.mktemp("grown")
    found = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BLOCK_BYTES", chance.choice([3000, 20_000]))
        patch.setattr(repeats, "TEXT_SAMPLE_ROWS", 16)
        for cut in [*sorted(chance.sample(range(40, len(log)), 2)), len(log)]:
            # The rules of an earlier run leave nothing in the cache that this one must not use.
            rule = conflicts if cut == len(log) else chance.choice(["keep_last", "keep_all", "drop_all"])
            text = ("\n".join(log[:cut]) + "\n").encode()
            # A line may still be being written.
            text = text[: len(text) - chance.choice([0, 1, 9])] if cut < len(log) else text
            found = prepare_text(folder / "grown", text, conflicts=rule, near_duplicate=0.7)
        fresh = prepare_in(folder / "fresh", log, conflicts=conflicts, near_duplicate=0.7)
    assert found == fresh


def test_rows_that_were_compared_are_not_read_again(tmp_path, monkeypatch):
    """The first rows of a window give the weights that all rows of the window are judged by."""
    monkeypatch.setattr(build, "BLOCK_BYTES", 1500)
    log = make_log(random.Random(5), 100)
    prepare_in(tmp_path, log, conflicts="keep_all", near_duplicate=0.7)
    learned = tmp_path / "work" / "sifted" / "learned"
    names = {path.stem for path in learned.iterdir()}
    assert names >= {"boilerplate", "line_weights", "near_proposed", "near_judged_0.7"}
    read = []
    before = repeats._read_sets

    def note(corpus, places):
        read.extend(places.tolist())
        return before(corpus, places)

    monkeypatch.setattr(repeats, "_read_sets", note)
    prepare_in(tmp_path, [*log, json.dumps(chat("Is it late?", "No.", status="success"))], near_duplicate=0.7)
    assert read == []


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04"])
def test_a_damaged_file_of_learned_weights_is_computed_again(tmp_path, damage):
    log = make_log(random.Random(6), 80)
    prepare_in(tmp_path / "grown", log[:70], near_duplicate=0.7)
    for path in (tmp_path / "grown" / "work" / "sifted" / "learned").iterdir():
        path.write_bytes(damage)
    assert prepare_in(tmp_path / "grown", log, near_duplicate=0.7) == prepare_in(
        tmp_path / "fresh", log, near_duplicate=0.7
    )


def test_arrays_of_other_rows_are_not_used(tmp_path):
    def ones(rows, calls):
        return lambda: calls.append(rows) or (np.ones(rows),)

    calls = []
    cache = PrefixCache(tmp_path, lambda rows: f"first {rows}")
    cache.remember("weights", 8, ones(8, calls))
    cache.remember("weights", 8, ones(8, calls))
    cache.save()
    again = PrefixCache(tmp_path, lambda rows: f"first {rows}")
    assert again.remember("weights", 8, ones(8, calls))[0].tolist() == [1.0] * 8
    assert calls == [8]
    other = PrefixCache(tmp_path, lambda rows: f"other {rows}")
    other.remember("weights", 8, ones(8, calls))
    again.remember("weights", 16, ones(16, calls))
    assert calls == [8, 8, 16]


def test_arrays_grow_from_those_of_the_last_run(tmp_path):
    seen = []

    def count(rows):
        def make(since, before):
            seen.append((since, None if before is None else before[0].tolist()))
            return (np.arange(rows),)

        return make

    for rows in (2, 3, 3, 1):
        cache = PrefixCache(tmp_path, lambda rows: f"first {rows}")
        assert cache.grow("pairs", rows, count(rows))[0].tolist() == list(range(rows))
        cache.save()
    assert seen == [(0, None), (2, [0, 1]), (3, [0, 1, 2]), (0, None)]


def count_work(monkeypatch):
    """The rows whose features are extracted, and the conversations that are tokenized."""
    seen = {"extracted": 0, "rendered": 0}
    extract, render = build._extract_row, WordRenderer.render_batch

    def count_extracted(*given, **more):
        seen["extracted"] += 1
        return extract(*given, **more)

    def count_rendered(self, conversations):
        seen["rendered"] += len(conversations)
        return render(self, conversations)

    monkeypatch.setattr(build, "_extract_row", count_extracted)
    monkeypatch.setattr(WordRenderer, "render_batch", count_rendered)
    return seen


def distinct_rows(count):
    chance = random.Random(4)
    words = [f"{first}{second}" for first in THINGS for second in THINGS]
    return [
        json.dumps(chat(f"What is the {' '.join(chance.sample(words, 9))} for?", f"It is for {n}, they say."))
        for n in range(count)
    ]


def copy_decisions(root):
    """Copy `grown` to `other`: what the preparation decided, and nothing that it computed."""
    folder = root / "other"
    shutil.copytree(root / "grown", folder)
    for path in (folder / "work" / "sifted").glob("*.arrow"):
        path.unlink()
    shutil.rmtree(folder / "work" / "shards")


def test_a_grown_log_costs_the_features_of_its_last_block_and_the_tokens_of_its_new_rows(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "BLOCK_BYTES", 5000)
    log = distinct_rows(63)
    rows_per_block = 5000 // min(map(len, log))
    prepare_in(tmp_path / "grown", log[:60])
    seen = count_work(monkeypatch)
    grown = prepare_in(tmp_path / "grown", log)
    assert seen["rendered"] == 3
    assert seen["extracted"] <= rows_per_block + 3
    assert grown == prepare_in(tmp_path / "fresh", log)


def test_a_row_that_is_no_longer_kept_does_not_tokenize_its_block_again(tmp_path, monkeypatch):
    log = distinct_rows(60)
    prepare_in(tmp_path / "grown", log)
    copy_decisions(tmp_path)
    replaced = json.dumps({**json.loads(log[7]), "status": "failure"})
    seen = count_work(monkeypatch)
    changed = [*log[:7], replaced, *log[8:]]
    grown = prepare_in(tmp_path / "grown", changed)
    assert seen["rendered"] <= 1
    assert grown == prepare_in(tmp_path / "other", changed)


@pytest.mark.parametrize("change", ["another first row", "shorter", "features lost", "features damaged"])
def test_a_log_that_did_not_only_grow_is_read_as_a_whole(tmp_path, monkeypatch, change):
    monkeypatch.setattr(build, "BLOCK_BYTES", 5000)
    log = distinct_rows(60)
    prepare_in(tmp_path / "grown", log[:55])
    copy_decisions(tmp_path)
    sifted = tmp_path / "grown" / "work" / "sifted"
    if change == "another first row":
        log[0] = log[0].replace("What", "That")
    elif change == "shorter":
        log = log[:50]
    elif change == "features lost":
        next(sifted.glob("*.arrow")).unlink()
    else:
        next(sifted.glob("*.arrow")).write_bytes(b"ARROW1")
    assert prepare_in(tmp_path / "grown", log) == prepare_in(tmp_path / "other", log)
