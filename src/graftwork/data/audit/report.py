"""The audit of a corpus: all findings, and counts, histograms, usage by day and examples next to them.

Input: the corpus, its repeats and its split assignment. Output: an `Audit`. Examples are chosen by the hash
of their content: the same rows every time. Usage counts dropped rows too, since they cost as well.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from graftwork.data.audit.corpus_findings import (
    find_clusters,
    find_conflicts,
    find_dominant_groups,
    find_empty_split,
    find_leaked,
    find_left_out,
    find_random_leaks,
    find_rare_groups,
    find_repeated,
    find_same_reply,
    find_sides,
    find_unusable,
    find_withdrawn,
    say_missing_side,
)
from graftwork.data.audit.findings import (
    PROMPT_FINGERPRINT,
    REPLY_FINGERPRINT,
    AuditedCorpus,
    AuditFacts,
    CountTokens,
    NoteCounts,
    RepeatColumns,
    SplitColumns,
    show_row,
)
from graftwork.data.audit.labels import estimate_noise, find_wrong_labels
from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.audit.row_findings import (
    NO_BASE,
    NO_MODEL,
    find_bad_replies,
    find_control_tokens_in_text,
    find_damaged_text,
    find_earlier_calls,
    find_foreign_models,
    find_other_scripts,
    find_overlong,
    find_placeholder_prompts,
    find_private_data,
    find_reasoning,
    find_taught,
    find_unconfirmed_captures,
    find_unreadable,
)
from graftwork.data.ingest.fields import FIRST_DAY
from graftwork.records.dataset import Audit, LengthHistogram, LengthSummary, NotLookedFor, ReadableRow
from graftwork.records.interaction import UsageDay

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Ten buckets per power of ten, at round numbers, up to ten million characters.
LENGTH_EDGES: tuple[int, ...] = (
    0,
    *(int(step * 10**power) for power in range(1, 7) for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
    10_000_000,
)
MOST_GROUPS_DRAWN = 3
EXAMPLES = 12


def count_labels(
    facts: AuditFacts, label: str, *, among: "NDArray[np.bool_] | None" = None
) -> dict[str, int]:
    """Count the rows per label, most frequent first."""
    import numpy as np

    numbers, names = facts.labels(label)
    mask = numbers >= 0 if among is None else (numbers >= 0) & among
    counts = np.bincount(numbers[mask], minlength=len(names))
    totals: dict[str, int] = {}
    for name, count in zip(names, counts, strict=True):
        if count:
            # Names that differ only by a secret are one after redaction.
            totals[name] = totals.get(name, 0) + int(count)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def summarize_lengths(lengths: "NDArray[Any]") -> LengthSummary:
    import numpy as np

    if not len(lengths):
        return LengthSummary(smallest=0, median=0, p95=0, largest=0)
    ordered = np.sort(lengths)
    return LengthSummary(
        smallest=int(ordered[0]),
        median=int(np.median(ordered)),
        p95=int(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]),
        largest=int(ordered[-1]),
    )


def draw_histograms(facts: AuditFacts) -> tuple[LengthHistogram, ...]:
    """Histograms of prompts and replies: of all rows, then of the largest groups."""
    numbers, names = facts.labels("group")
    largest = list(count_labels(facts, "group"))[:MOST_GROUPS_DRAWN]
    histograms = []
    columns: tuple[tuple[Literal["prompt", "reply"], str], ...] = (
        ("prompt", "prompt_chars"),
        ("reply", "reply_chars"),
    )
    for of, column in columns:
        lengths = facts.corpus.column(column)
        histograms.append(LengthHistogram(of=of, counts=_count(lengths)))
        histograms += [
            LengthHistogram(of=of, group=name, counts=_count(lengths[numbers == names.index(name)]))
            for name in largest
        ]
    return tuple(histograms)


def choose_examples(facts: AuditFacts) -> tuple[ReadableRow, ...]:
    import numpy as np

    usable = np.flatnonzero(facts.usable)
    fingerprints = (
        facts.fingerprints(PROMPT_FINGERPRINT)[usable] ^ facts.fingerprints(REPLY_FINGERPRINT)[usable]
    )
    mixed = fingerprints.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    positions = usable[np.argsort(mixed, kind="stable")[:EXAMPLES]]
    rows = facts.read(positions)
    return tuple(show_row(rows[position]) for position in sorted(rows))


def _count(lengths: "NDArray[Any]") -> tuple[int, ...]:
    import numpy as np

    buckets = np.searchsorted(np.array(LENGTH_EDGES), lengths, side="right") - 1
    return tuple(int(count) for count in np.bincount(buckets, minlength=len(LENGTH_EDGES)))


def find_not_looked_for(facts: AuditFacts) -> Iterator[NotLookedFor]:
    """List what could not be checked."""
    if not facts.corpus.rows:
        return

    def has(label: str) -> bool:
        return bool((facts.labels(label)[0] >= 0).any())

    if not has("status"):
        yield NotLookedFor(code="failed_status", why="no row states a status")
    if not has("group") and not has("domain"):
        why = "no row names the role or the domain of its agent; only equal replies were counted"
        yield NotLookedFor(code="rare_group", why=why)
        yield NotLookedFor(code="imbalance", why=why)
    if not has("model"):
        yield NotLookedFor(code="foreign_model", why=f"{NO_MODEL}; only reasoning in tags was seen")
    elif facts.context.base is None:
        yield NotLookedFor(code="foreign_model", why=NO_BASE)
    trained, held_out = (bool(side.any()) for side in find_sides(facts))
    if trained != held_out:
        yield NotLookedFor(code="split_leak", why=say_missing_side(trained=trained))


def count_usage(facts: AuditFacts) -> tuple[UsageDay, ...]:
    """One record for each day, role and model, in that order."""
    import numpy as np

    corpus = facts.corpus
    if not corpus.rows:
        return ()
    days = corpus.column("day").astype(np.int64)
    groups, models = facts.labels("group"), facts.labels("model")
    keys = np.stack([days, groups[0].astype(np.int64), models[0].astype(np.int64)])
    combinations, where = np.unique(keys, axis=1, return_inverse=True)
    where = where.reshape(-1)

    def total(values: "NDArray[Any]", mask: "NDArray[Any]") -> "NDArray[Any]":
        weights = np.where(mask, values, 0).astype(np.float64)
        return np.bincount(where, weights=weights, minlength=combinations.shape[1])

    prompt, reply = corpus.column("prompt_tokens"), corpus.column("reply_tokens")
    cached, cost = corpus.column("cached_tokens"), corpus.column("cost")
    counted, costed = (prompt >= 0) & (reply >= 0), cost >= 0
    everything = np.ones(corpus.rows, dtype=bool)
    unpriced = counted & ~costed
    chars, reply_characters = corpus.column("prompt_chars"), corpus.column("reply_chars")
    sums = {
        "calls": total(np.ones(corpus.rows), everything),
        "prompt_characters": total(chars, everything),
        "reply_characters": total(reply_characters, everything),
        "counted": total(np.ones(corpus.rows), counted),
        "prompt_tokens": total(prompt, counted),
        "cached_tokens": total(np.maximum(cached, 0), counted),
        "reply_tokens": total(reply, counted),
        "uncounted_prompt_characters": total(chars, ~counted & ~costed),
        "uncounted_reply_characters": total(reply_characters, ~counted & ~costed),
        "costed": total(np.ones(corpus.rows), costed),
        "cost": total(cost, costed),
        "unpriced_prompt_tokens": total(prompt, unpriced),
        "unpriced_cached_tokens": total(np.maximum(cached, 0), unpriced),
        "unpriced_reply_tokens": total(reply, unpriced),
    }
    records = []
    for column, (day, group, model) in enumerate(combinations.T.tolist()):
        figures = {name: float(values[column]) for name, values in sums.items()}
        records.append(
            UsageDay(
                day=None if day < 0 else FIRST_DAY + timedelta(days=day),
                group=groups[1][group] if group >= 0 else None,
                model=models[1][model] if model >= 0 else None,
                **{name: value if name == "cost" else round(value) for name, value in figures.items()},
            )
        )
    return tuple(records)


RULES = (
    find_unusable,
    find_empty_split,
    find_unreadable,
    find_bad_replies,
    find_placeholder_prompts,
    find_earlier_calls,
    find_private_data,
    find_damaged_text,
    find_other_scripts,
    find_control_tokens_in_text,
    find_overlong,
    find_foreign_models,
    find_reasoning,
    find_repeated,
    find_conflicts,
    find_leaked,
    find_random_leaks,
    find_rare_groups,
    find_dominant_groups,
    find_same_reply,
    find_unconfirmed_captures,
    find_taught,
    find_left_out,
    find_withdrawn,
)
_WEIGHT = {"blocker": 0, "warning": 1, "info": 2}


def audit_corpus(
    corpus: AuditedCorpus,
    repeated: RepeatColumns,
    assignment: SplitColumns,
    *,
    context: AuditContext,
    count_tokens: CountTokens | None = None,
) -> Audit:
    """Apply every rule. The most severe findings come first."""
    facts = AuditFacts(corpus, repeated, assignment, NoteCounts(corpus.notes()), context, count_tokens)
    noise = estimate_noise(facts)
    findings = sorted(
        (*(finding for rule in RULES for finding in rule(facts)), *find_wrong_labels(noise)),
        key=lambda finding: (_WEIGHT[finding.severity], -finding.count),
    )
    codes = {finding.code for finding in findings}
    return Audit(
        files=tuple(dict.fromkeys(log.file for log in corpus.inputs)),
        rows=corpus.rows + sum(1 for _ in corpus.faults()),
        readable=corpus.rows,
        usable=int(facts.usable.sum()),
        lengths_counted=facts.lengths.is_counted,
        fit_to_train=not any(finding.severity == "blocker" for finding in findings),
        findings=tuple(findings),
        groups=count_labels(facts, "group"),
        prompt_length=summarize_lengths(corpus.column("prompt_chars")),
        reply_length=summarize_lengths(corpus.column("reply_chars")),
        # What was found says so itself.
        not_looked_for=tuple(lacking for lacking in find_not_looked_for(facts) if lacking.code not in codes),
        usable_groups=count_labels(facts, "group", among=facts.usable),
        domains=count_labels(facts, "domain"),
        models=count_labels(facts, "model"),
        length_edges=LENGTH_EDGES,
        length_histograms=draw_histograms(facts),
        clusters=find_clusters(facts),
        examples=choose_examples(facts),
        label_noise=noise,
        usage=count_usage(facts),
    )
