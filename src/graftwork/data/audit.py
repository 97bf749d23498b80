"""May these logs be trained on as they are? The first thing that a curious user asks.

In: logs, or the corpus that they were sifted to. Out: an `Audit`: every kind of fault with its count,
its rows, an example without secrets, what it does to training, and the setting that mends it. Needs
no project, no model and no tokenizer, and never holds the rows.
"""

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from graftwork.data.dealing import group_and_deal
from graftwork.data.gather import gather
from graftwork.data.paraphrase import find_embedder
from graftwork.data.ports import Progress
from graftwork.data.repeats import find_repeats
from graftwork.data.rules.balance import find_imbalance
from graftwork.data.rules.captured import find_unconfirmed_captures
from graftwork.data.rules.clusters import find_clusters
from graftwork.data.rules.control import find_control_tokens_in_text
from graftwork.data.rules.facts import Corpus, Dealing, Facts, Repeats
from graftwork.data.rules.foreign import find_foreign_models
from graftwork.data.rules.gather import Tally
from graftwork.data.rules.judged import find_bad_replies
from graftwork.data.rules.labels import estimate_noise, find_wrong_labels
from graftwork.data.rules.lacking import find_lacking
from graftwork.data.rules.language import find_damaged_text
from graftwork.data.rules.leak import find_split_leaks
from graftwork.data.rules.length import find_overlong
from graftwork.data.rules.note import Sight
from graftwork.data.rules.private import find_private_data
from graftwork.data.rules.prompt import find_placeholder_prompts
from graftwork.data.rules.repeats import find_repeated
from graftwork.data.rules.summary import (
    LENGTH_EDGES,
    choose_examples,
    count_labels,
    draw_histograms,
    summarise_lengths,
)
from graftwork.data.rules.unreadable import find_unreadable
from graftwork.data.rules.unusable import find_unusable
from graftwork.data.settings import DataSettings
from graftwork.records.audit import Audit

RULES = (
    find_unusable,
    find_unreadable,
    find_bad_replies,
    find_placeholder_prompts,
    find_private_data,
    find_damaged_text,
    find_control_tokens_in_text,
    find_overlong,
    find_foreign_models,
    find_repeated,
    find_split_leaks,
    find_imbalance,
    find_unconfirmed_captures,
)
_WEIGHT = {"blocker": 0, "warning": 1, "info": 2}


def audit(sight: Sight, *, folder: Path, root: Path = Path(), on_progress: Progress | None = None) -> Audit:
    """Sift the logs into `folder`, look at what is there, and answer."""
    started = time.perf_counter()
    report = on_progress or (lambda _phase, _done, _total: None)
    corpus = gather(sight, folder=folder, root=root, on_progress=report)
    report("find repeats", 0, 1)
    repeated = find_repeats(corpus, settings=sight.settings)
    report("group questions", 0, 1)
    embedder = find_embedder(sight.settings)
    dealing = group_and_deal(corpus, settings=sight.settings, embedder=embedder)
    report("look at all rows", 0, 1)
    found = audit_corpus(corpus, repeated, dealing, sight=sight)
    return found.model_copy(update={"seconds": time.perf_counter() - started})


def audit_files(paths: Iterable[str], settings: DataSettings | None = None, *, root: Path = Path()) -> Audit:
    """The same without a project, and without leaving anything behind."""
    named = (settings or DataSettings()).model_copy(update={"logs": tuple(paths)})
    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit(Sight(settings=named), folder=Path(folder), root=root)


def audit_corpus(corpus: Corpus, repeated: Repeats, dealing: Dealing, *, sight: Sight) -> Audit:
    """Ask every rule, and answer. The gravest findings come first."""
    facts = Facts(corpus, repeated, dealing, Tally(corpus.notes()), sight)
    noise = estimate_noise(facts)
    findings = sorted(
        (*(finding for rule in RULES for finding in rule(facts)), *find_wrong_labels(noise)),
        key=lambda finding: (_WEIGHT[finding.severity], -finding.count),
    )
    return Audit(
        files=tuple(dict.fromkeys(given.file for given in corpus.inputs)),
        rows=corpus.rows + sum(1 for _ in corpus.faults()),
        readable=corpus.rows,
        usable=int(facts.usable.sum()),
        fit_to_train=not any(finding.severity == "blocker" for finding in findings),
        findings=tuple(findings),
        groups=count_labels(facts, "group"),
        prompt_length=summarise_lengths(corpus.column("prompt_chars")),
        reply_length=summarise_lengths(corpus.column("reply_chars")),
        not_looked_for=tuple(find_lacking(facts, found={finding.code for finding in findings})),
        usable_groups=count_labels(facts, "group", among=facts.usable),
        domains=count_labels(facts, "domain"),
        models=count_labels(facts, "model"),
        length_edges=LENGTH_EDGES,
        length_histograms=draw_histograms(facts),
        clusters=find_clusters(facts),
        examples=choose_examples(facts),
        label_noise=noise,
    )
