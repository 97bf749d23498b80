"""The stages of preparation one by one: rows a second each, and de-duplication beside datasketch.

The same generated rows go through every stage in this process, on one core; the audit is the whole
command's work, on all cores. De-duplication is measured against an index of MinHashes in memory, as
datasketch has it, with the same shingles, permutations and threshold.

    python benchmarks/data_stages.py [--rows 10000]        # pip install datasketch for the comparison
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_scale import make_rows, write_log

from graftwork.data.audit.row_checks import AuditContext, check_row, redact_row
from graftwork.data.corpus.build import build_corpus
from graftwork.data.dedup.fingerprints import compute_fingerprints
from graftwork.data.dedup.lsh import CorpusColumns
from graftwork.data.dedup.repeats import find_repeats
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block
from graftwork.data.prepare import audit_files
from graftwork.data.render.dataset import pack_rows
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import assign_splits
from graftwork.records.interaction import Interaction
from graftwork.text.words import words

ROUNDS = 3


def seconds(work: Callable[[], object]) -> float:
    """The median of some rounds."""
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def by_datasketch(rows: Sequence[Interaction], *, threshold: float) -> int:
    """How many rows an index of MinHashes takes for repeats of an earlier one."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=128)
    repeats = 0
    for number, row in enumerate(rows):
        said = words("\n".join([*(m.content for m in row.messages if m.role != "system"), row.reply]))
        print_of = MinHash(num_perm=128)
        print_of.update_batch({" ".join(said[at : at + 3]).encode() for at in range(len(said) - 2)})
        if index.query(print_of):
            repeats += 1
        index.insert(str(number), print_of)
    return repeats


def measure(rows: int) -> None:
    with tempfile.TemporaryDirectory(prefix="graft-stages-") as name:
        folder = Path(name)
        log = folder / "log.jsonl"
        write_log(log, make_rows(rows, seed=3), mode="wb")
        settings = DataSettings(logs=("log.jsonl",))
        context = AuditContext(settings=settings)
        blocks = list(cut_blocks("log.jsonl", root=folder))
        read = [row.result for block in blocks for row in read_block(block, settings=settings)]
        inside = [row for row in read if isinstance(row, Interaction)]
        redacted = [redact_row(row) for row in inside]
        corpus: CorpusColumns = build_corpus(
            context, folder=folder / "sifted", root=folder, on_progress=lambda *_said: None
        )
        taken = {
            "read": seconds(lambda: [list(read_block(block, settings=settings)) for block in blocks]),
            "redact": seconds(lambda: [redact_row(row) for row in inside]),
            "rules": seconds(
                lambda: [
                    check_row(row, clean, context=context)
                    for row, clean in zip(inside, redacted, strict=True)
                ]
            ),
            "prints": seconds(lambda: compute_fingerprints(inside, settings=settings)),
            "find repeats": seconds(lambda: find_repeats(corpus, settings=settings)),
            "group and split": seconds(lambda: assign_splits(corpus, settings=settings)),
            "audit, whole": seconds(lambda: audit_files(["log.jsonl"], root=folder)),
        }
        print(f"{rows:,} rows of {log.stat().st_size / rows:,.0f} bytes")
        for stage, cost in taken.items():
            print(f"{stage:<28}{rows / cost:>10,.0f} rows/s")
        _compare(inside, settings, ours=taken["prints"] + taken["find repeats"])


def measure_packing(rows: int = 1_000_000, *, length: int = 2048) -> None:
    """Lengths as logs have them: many short ones, a few that fill a sequence."""
    import numpy as np

    drawn = np.random.default_rng(5).lognormal(mean=5.8, sigma=0.8, size=rows)
    lengths = np.clip(drawn, 8, length).astype(np.int64)
    cost = seconds(lambda: pack_rows(lengths, length=length))
    sequences = pack_rows(lengths, length=length).sequences
    print(f"{'pack into ' + str(length) + ' tokens':<28}{rows / cost:>10,.0f} rows/s   ", end="")
    print(f"{lengths.sum() / (sequences * length):.2%} full")


def _compare(rows: Sequence[Interaction], settings: DataSettings, *, ours: float) -> None:
    try:
        theirs = seconds(lambda: by_datasketch(rows, threshold=settings.near_duplicate))
    except ImportError:
        print("de-duplication: datasketch is not installed, no comparison: pip install datasketch")
        return
    print(f"{'de-duplicate (fingerprints, find)':<28}{len(rows) / ours:>10,.0f} rows/s")
    print(f"{'de-duplicate, datasketch':<28}{len(rows) / theirs:>10,.0f} rows/s   ours {theirs / ours:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    measure(parser.parse_args().rows)
    measure_packing()


if __name__ == "__main__":
    main()
