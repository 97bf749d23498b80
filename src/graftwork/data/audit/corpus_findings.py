"""Findings about rows in relation to each other: balance, repeats, contradictions, clusters, split leaks,
empty splits, calls of traces that were made again, and what is left out by which rule.

Input: corpus facts. Output: findings and the clusters to read side by side.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from graftwork.data.audit.findings import (
    DUPLICATE,
    MOST_ROWS,
    NEAR_DUPLICATE,
    PROMPT_FINGERPRINT,
    REPLY_FINGERPRINT,
    AuditFacts,
    Wording,
    count_rows,
    finding_from_rows,
    say_fix,
    show_row,
)
from graftwork.data.audit.row_checks import RATED_BAD, RETRIED, say_bad_score
from graftwork.data.ingest.blocks import IN_OTHER_FILE
from graftwork.records.dataset import SPLITS, Cluster, ClusterKind, Finding, Severity
from graftwork.records.interaction import Interaction, Origin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


RARE = 10
LARGEST_SHARE = 0.5
SAME_REPLY_SHARE = 0.25
# With fewer rows, every share is chance.
ENOUGH_ROWS = 20
MOST_NAMED = 8
LABELS = {"group": "roles", "domain": "domains"}


def find_rare_groups(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    for label, kind in LABELS.items():
        numbers, names = facts.labels(label)
        usable = np.bincount(numbers[facts.usable & (numbers >= 0)], minlength=len(names))
        logged = np.bincount(numbers[numbers >= 0], minlength=len(names))
        rare = np.flatnonzero((usable < RARE) & (logged > 0))
        positions = np.flatnonzero(np.isin(numbers, rare))
        if np.count_nonzero(logged) < 2 or not len(positions):
            continue
        ordered = sorted(rare, key=lambda number: names[number])
        listing = ", ".join(
            f"{names[number]} {usable[number]} of {logged[number]}" for number in ordered[:MOST_NAMED]
        )
        suffix = f" and {len(rare) - MOST_NAMED} more" if len(rare) > MOST_NAMED else ""
        fix = "log more of them, or leave them out of the files under data.logs"
        if kind == "roles":
            fix += "; a teacher can add some (`graft data repair --augment role=NAME --dry-run`)"
        yield finding_from_rows(
            facts,
            "rare_group",
            "warning",
            positions,
            show=_question_with_label(numbers, names),
            reasons={names[number]: int(usable[number]) for number in ordered[:40]},
            wording=Wording(
                title=count_rows(len(positions), "belong")
                + f" to {kind} with fewer than {RARE} usable rows ({listing}{suffix})",
                effect="too few to learn from, and too few to hold some out and measure",
                fix=fix,
            ),
        )


def find_dominant_groups(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    rows = int(facts.usable.sum())
    for label in LABELS:
        numbers, names = facts.labels(label)
        counts = np.bincount(numbers[facts.usable & (numbers >= 0)], minlength=len(names))
        if rows < ENOUGH_ROWS or np.count_nonzero(counts) < 2 or counts.max() <= LARGEST_SHARE * rows:
            continue
        largest = int(counts.argmax())
        yield finding_from_rows(
            facts,
            "imbalance",
            "info",
            np.flatnonzero(facts.usable & (numbers == largest)),
            show=lambda row, position: row.question,
            wording=Wording(
                title=f"{counts[largest]:,} of {rows:,} usable rows belong to {names[largest]}",
                effect="the model becomes good at this group at the expense of the others",
                fix="log more of the other groups, or check the metrics of each group in the evaluation",
            ),
        )


def _question_with_label(numbers: "NDArray[Any]", names: Sequence[str]) -> Callable[[Interaction, int], str]:
    return lambda row, position: f"{names[numbers[position]]}: {row.question}"


def find_same_reply(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    usable = np.flatnonzero(facts.usable)
    if len(usable) < ENOUGH_ROWS:
        return
    _, number, counts = np.unique(
        facts.fingerprints(REPLY_FINGERPRINT)[usable], return_inverse=True, return_counts=True
    )
    most = int(counts.argmax())
    if counts[most] > SAME_REPLY_SHARE * len(usable):
        yield finding_from_rows(
            facts,
            "imbalance",
            "info",
            usable[number == most],
            show=lambda row, position: row.reply,
            wording=Wording(
                title=f"{counts[most]:,} of {len(usable):,} usable rows have the same reply",
                effect="the model may give this reply where another is right",
                fix="check that the evaluation measures both sides: where this reply is right and where not",
            ),
        )


_CONFLICTS_DONE = {
    "keep_last": "keeps the reply that was logged last",
    "drop_all": "drops all of them",
    "keep_all": "keeps all of them",
}


def find_repeated(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    settings, instead = facts.settings, facts.repeats.instead
    fix = f"`graft data prepare` keeps the {settings.keep_duplicate} of each (data.keep_duplicate)"

    def name_kept(position: int) -> str:
        original = int(instead[position])
        return "another row" if original < 0 else str(facts.corpus.origin(original))

    same = np.flatnonzero(facts.repeats.step == DUPLICATE)
    if len(same):
        yield finding_from_rows(
            facts,
            "duplicate",
            "warning",
            same,
            show=lambda row, position: f"the same as {name_kept(position)}: {row.question}",
            wording=Wording(
                title=count_rows(len(same), "repeat an earlier row"),
                effect="repeated rows are memorized, and a held-out copy tests nothing",
                fix=fix,
            ),
        )
    near = np.flatnonzero(facts.repeats.step == NEAR_DUPLICATE)
    if len(near):
        yield finding_from_rows(
            facts,
            "near_duplicate",
            "warning",
            near,
            show=lambda row, position: f"nearly the same as {name_kept(position)}: {row.question}",
            wording=Wording(
                title=count_rows(len(near), "nearly repeat an earlier row"),
                effect="they weigh in training as if they were different rows",
                fix=f"{fix}; data.near_duplicate sets the similarity ({settings.near_duplicate})",
            ),
        )


def find_conflicting(facts: AuditFacts, among: "NDArray[np.bool_]") -> "NDArray[Any]":
    """Return all rows whose prompt has different replies, grouped by prompt, in the order of first rows."""
    import numpy as np

    prompts = facts.fingerprints(PROMPT_FINGERPRINT)
    # Most prompts occur once: only the others matter here.
    ordered = np.sort(prompts[among])
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(several):
        return np.zeros(0, dtype=np.int64)
    index = np.minimum(np.searchsorted(several, prompts), len(several) - 1)
    positions = np.flatnonzero(among & (several[index] == prompts))
    prompts, replies = prompts[positions], facts.fingerprints(REPLY_FINGERPRINT)[positions]
    _, first, number = np.unique(prompts, return_index=True, return_inverse=True)
    order = np.lexsort((replies, number))
    new = (number[order][1:] == number[order][:-1]) & (replies[order][1:] != replies[order][:-1])
    torn = np.zeros(len(first), dtype=bool)
    torn[number[order][1:][new]] = True
    inside = np.flatnonzero(torn[number])
    return positions[inside[np.lexsort((inside, first[number[inside]]))]]


def find_conflicts(facts: AuditFacts) -> Iterator[Finding]:
    positions = find_conflicting(facts, facts.passed)
    logged = find_conflicting(facts, facts.fingerprints(PROMPT_FINGERPRINT) != 0)
    if not len(logged):
        return
    title = count_rows(len(positions), "share a prompt with a row that has another reply")
    if len(logged) > len(positions):
        title += f" ({len(logged):,} in the whole log, before unusable rows are dropped)"
    yield finding_from_rows(
        facts,
        "conflicting_answers",
        "warning" if len(positions) else "info",
        positions if len(positions) else logged,
        show=lambda row, position: row.reply,
        wording=Wording(
            title=title,
            effect="the model is pulled in both directions and learns neither",
            fix=f"`graft data prepare` {_CONFLICTS_DONE[facts.settings.conflicts]} "
            f"(data.conflicts: {facts.settings.conflicts})",
        ),
    )


MOST_CLUSTERS = 50
MOST_CLUSTER_ROWS = 20
MOST_SHOWN = 4
MOST_CHARACTERS = 400


def find_clusters(facts: AuditFacts) -> tuple[Cluster, ...]:
    """Return the largest clusters; contradictions before repeats."""
    import numpy as np

    clusters: list[tuple[ClusterKind, int, list[int], list[int]]] = []
    prompts, replies = facts.fingerprints(PROMPT_FINGERPRINT), facts.fingerprints(REPLY_FINGERPRINT)
    conflicting = find_conflicting(facts, prompts != 0)
    for members in _largest_runs(conflicting, prompts[conflicting]):
        _, first = np.unique(replies[members], return_index=True)
        examples = [int(members[index]) for index in sorted(first)[:MOST_SHOWN]]
        positions = [int(position) for position in members[:MOST_CLUSTER_ROWS]]
        clusters.append(("conflicting_answers", len(members), positions, examples))
    instead, step = facts.repeats.instead, facts.repeats.step
    kinds: tuple[tuple[ClusterKind, int], ...] = (
        ("duplicate", DUPLICATE),
        ("near_duplicate", NEAR_DUPLICATE),
    )
    for kind, number in kinds:
        gone = np.flatnonzero((step == number) & (instead >= 0))
        for members in _largest_runs(gone, instead[gone]):
            # The row that stays comes first.
            positions = [int(instead[members[0]]), *map(int, members[: MOST_CLUSTER_ROWS - 1])]
            # Identical rows need to be read only once.
            examples = positions[:1] if kind == "duplicate" else positions[:MOST_SHOWN]
            clusters.append((kind, len(members) + 1, positions, examples))
    weight = {"conflicting_answers": 0, "near_duplicate": 1, "duplicate": 2}
    clusters.sort(key=lambda cluster: (-cluster[1], weight[cluster[0]], cluster[2][0]))
    largest = sorted(clusters[:MOST_CLUSTERS], key=lambda cluster: weight[cluster[0]])
    rows = facts.read(position for *_, examples in largest for position in examples)
    return tuple(
        Cluster(
            kind=kind,
            size=size,
            rows=facts.origins(positions),
            shown=tuple(show_row(rows[position], most=MOST_CHARACTERS) for position in examples),
        )
        for kind, size, positions, examples in largest
    )


def _largest_runs(positions: "NDArray[Any]", keys: "NDArray[Any]") -> "Iterator[NDArray[Any]]":
    """Yield positions that share a key, for the most frequent keys."""
    import numpy as np

    order = np.argsort(keys, kind="stable")
    _, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
    for run in np.argsort(-counts, kind="stable")[:MOST_CLUSTERS]:
        yield positions[order[starts[run] : starts[run] + counts[run]]]


def say_together(split_by: str) -> str:
    """Say what rows of one group have in common, as a verb."""
    return {
        "question": "ask alike",
        "session": "ask alike or are of one session",
    }.get(split_by, f"ask alike or have the same `{split_by}`")


def say_like_another(split_by: str, noun: str) -> str:
    """Say the same about one row and another: `ask what a training row asks`."""
    asks = f"ask what {noun} asks"
    return {
        "question": asks,
        "session": f"{asks} or are of its session",
    }.get(split_by, f"{asks} or have its `{split_by}`")


Side = Literal["trained", "held_out"]
_TRAINED = re.compile(r"(?:^|[^a-z])(?:train|training|sft)(?:[^a-z]|$)")
_HELD_OUT = re.compile(
    r"(?:^|[^a-z])(?:test|testing|valid|validation|val|dev|development|eval|evaluation|held-?_?out|holdout)"
    r"(?:[^a-z]|$)"
)


def name_side(name: str) -> Side | None:
    """Return the split that the name of a split, a file or its folder denotes."""
    path = PurePath(name.casefold())
    for part in (path.name, path.parent.name):
        if _HELD_OUT.search(part):
            return "held_out"
        if _TRAINED.search(part):
            return "trained"
    return None


def find_sides(facts: AuditFacts) -> "tuple[NDArray[np.bool_], NDArray[np.bool_]]":
    """Return which rows are trained on and which are held out: by their split, else by their file's name."""
    import numpy as np

    side = np.zeros(facts.corpus.rows, dtype=np.int8)
    for label in ("file", "split"):
        numbers, names = facts.labels(label)
        numbered = np.array([{"trained": 1, "held_out": 2, None: 0}[name_side(name)] for name in names] + [0])
        side = np.where(numbered[numbers] > 0, numbered[numbers], side)
    return side == 1, side == 2


def say_missing_side(*, trained: bool) -> str:
    """Say what to add where only one side of a split was given."""
    here, missing = ("training", "held-out") if trained else ("held-out", "training")
    return (
        f"judging by the file name these are the {here} rows of a split: add the {missing} file to find "
        "questions that are on both sides"
    )


def expect_leaks(sizes: "NDArray[Any]", *, held_out: float) -> float:
    """The expected number of test rows with a twin outside the test, when rows are split at random."""
    return float((sizes * held_out * (1 - held_out ** (sizes - 1.0))).sum())


def find_leaked(facts: AuditFacts) -> Iterator[Finding]:
    """Find held-out rows that ask what a training row asks, in logs that are already split."""
    import numpy as np

    trained, held_out = find_sides(facts)
    twin = np.full(facts.corpus.rows, -1, dtype=np.int64)
    groups, fingerprints = facts.assignment.group, facts.fingerprints(PROMPT_FINGERPRINT)
    for key, is_keyed in ((groups, groups >= 0), (fingerprints, fingerprints != 0)):
        positions = np.flatnonzero(trained & is_keyed)
        values, first = np.unique(key[positions], return_index=True)
        if not len(values):
            continue
        index = np.minimum(np.searchsorted(values, key), len(values) - 1)
        hit = held_out & is_keyed & (values[index] == key) & (twin < 0)
        twin[hit] = positions[first[index[hit]]]
    leaked = np.flatnonzero(twin >= 0)
    if not len(leaked):
        return
    split_by = facts.settings.split_by
    met = "asked" if split_by == "question" else "met"
    yield finding_from_rows(
        facts,
        "split_leak",
        "blocker",
        leaked,
        show=lambda row, position: f"{met} in {facts.corpus.origin(int(twin[position]))} too: {row.question}",
        wording=Wording(
            title=f"{len(leaked):,} of {int(held_out.sum()):,} held-out rows "
            + say_like_another(split_by, "a training row"),
            effect="the evaluation measures memorization instead of skill",
            fix="remove these rows from one of the two splits; `graft data prepare` keeps rows together that "
            f"{say_together(split_by)} (data.split_by)",
        ),
    )


def find_random_leaks(facts: AuditFacts) -> Iterator[Finding]:
    """Find rows whose question occurs in another row too: a random split puts them on both sides."""
    import numpy as np

    trained, held_out = (bool(side.any()) for side in find_sides(facts))
    if trained and held_out:
        return
    settings = facts.settings
    groups = np.where(facts.passed, facts.assignment.group, -1)
    # A group is named by its first row: sizes[row] counts its members.
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    twins = np.flatnonzero((groups >= 0) & (sizes[groups] > 1))
    expected = expect_leaks(sizes[sizes > 1], held_out=settings.test)
    if not len(twins) or expected < 1:
        return
    positions = twins[np.argsort(groups[twins], kind="stable")]
    title = (
        count_rows(len(positions), say_like_another(settings.split_by, "another row"))
        + f": a random split would test about {expected:,.0f} of them and train on a similar row"
    )
    fingerprints = facts.fingerprints(PROMPT_FINGERPRINT)
    _, logged = np.unique(fingerprints[fingerprints != 0], return_counts=True)
    before = expect_leaks(logged[logged > 1], held_out=settings.test)
    if before > expected + 1:
        title += f" (about {before:,.0f} of the whole log, before unusable rows are dropped)"
    if trained or held_out:
        title += f"; leaks between files were not checked: {say_missing_side(trained=trained)}"
    yield finding_from_rows(
        facts,
        "split_leak",
        "warning",
        positions,
        show=lambda row, position: row.question,
        wording=Wording(
            title=title,
            effect="the evaluation would measure memorization instead of skill",
            fix="`graft data prepare` splits by group, never by row: rows that "
            f"{say_together(settings.split_by)} stay together (data.split_by); data.question_similarity "
            f"sets the similarity ({settings.question_similarity})",
        ),
    )


LARGE_GROUP = 30
"""With fewer similar rows, the log is small rather than one-sided."""


def find_unusable(facts: AuditFacts) -> Iterator[Finding]:
    if facts.usable.any():
        return
    readable = facts.corpus.rows
    unreadable = sum(1 for _ in facts.corpus.faults())
    lost = islice(facts.corpus.faults(), max(0, MOST_ROWS - readable))
    yield Finding(
        code="nothing_usable",
        severity="blocker",
        count=readable + unreadable,
        rows=(*facts.origins(range(min(readable, MOST_ROWS))), *(fault.origin for _, fault in lost)),
        examples=(),
        title="no row is left to train on",
        effect="there is nothing to learn from",
        fix="the other findings say why no row is left; fix them, or specify other files under data.logs",
    )


def find_empty_split(facts: AuditFacts) -> Iterator[Finding]:
    """Find a group of similar rows so large that another split stays empty."""
    import numpy as np

    settings = facts.settings
    shares = {"validation": settings.validation, "test": settings.test}
    if not facts.usable.any():
        return
    splits = facts.assignment.split[facts.usable]
    empty = [
        split
        for number, split in enumerate(SPLITS)
        if shares.get(split, 1.0) > 0 and not (splits == number).any()
    ]
    groups = np.where(facts.usable, facts.assignment.group, -1)
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    largest = int(sizes.argmax())
    if not empty or sizes[largest] < LARGE_GROUP:
        return
    positions = np.flatnonzero(groups == largest)
    yield finding_from_rows(
        facts,
        "empty_split",
        "blocker",
        positions,
        show=lambda row, _place: row.question,
        wording=Wording(
            title=f"{len(positions):,} of {int(facts.usable.sum()):,} usable rows ask the same; "
            f"no row is left for {' and '.join(empty)}",
            effect="`graft data prepare` keeps rows that ask the same in one split and would refuse this log",
            fix="log more different questions; raise data.question_similarity "
            f"({settings.question_similarity}) if these ask different things; or set the share of "
            "an unneeded split to 0",
        ),
    )


_RULES = {
    "no_content": "calls of models without recorded messages",
    IN_OTHER_FILE: "spans of calls whose messages are in log records",
    "no_reply": "calls of models without a recorded reply",
    "other_span": "spans of agents, tools and other work",
    "repeats_other_span": "spans of agents that repeat the calls below them",
    "other_call": "calls that are not chats, such as embeddings",
    "score_without_number": "scores without a number",
    "too_much_context": "replies with more than 256 KiB of conversation before them",
    "other_line": "lines of transcripts that hold no message",
    "api_error": "errors of the API in place of a reply",
    "not_text": "replies after pictures or files",
}
_CONTENT = "no_content"
_MOST_NAMED = 4


def find_left_out(facts: AuditFacts) -> Iterator[Finding]:
    """Count what the lines of traces hold besides rows. Missing content is a warning of its own."""
    counts: Counter[str] = Counter()
    rows: dict[bool, list[Origin]] = {True: [], False: []}
    for part in facts.corpus.left_out():
        counts[part.rule] += part.count
        origins = rows[part.rule == _CONTENT]
        if len(origins) < MOST_ROWS:
            origins.append(part.origin)
    missing = counts.pop(_CONTENT, 0)
    if missing:
        yield Finding(
            code="no_content",
            severity="warning",
            count=missing,
            rows=tuple(rows[True]),
            title=f"{_count(missing, 'calls')} of models in the traces "
            f"{'has' if missing == 1 else 'have'} no content",
            effect="they cannot be learned from: the trace has times and tokens, but no messages",
            fix="let the instrumentation record messages; for OpenTelemetry, "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only",
        )
    if counts:
        total = sum(counts.values())
        reasons = {_RULES.get(rule, rule): count for rule, count in counts.most_common()}
        listed = ", ".join(_count(count, reason) for reason, count in list(reasons.items())[:_MOST_NAMED])
        yield Finding(
            code="left_out",
            severity="info",
            count=total,
            rows=tuple(rows[False]),
            reasons=reasons,
            title=f"{_count(total, 'parts')} of the traces "
            f"{'is not a row' if total == 1 else 'are not rows'}: {listed}",
            effect="only calls of models with a reply become rows: one for each reply",
            fix="nothing needs to be done",
        )


def _count(count: int, what: str) -> str:
    """`1 span of agents`, `2 replies after pictures`: `what` begins with the plural noun."""
    noun, space, tail = what.partition(" ")
    if count == 1:
        noun = f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")
    return f"{count:,} {noun}{space}{tail}"


def find_withdrawn(facts: AuditFacts) -> Iterator[Finding]:
    """Rows of traces that other lines of the logs contradict."""
    wordings: tuple[tuple[str, Severity, str, str, str], ...] = (
        (
            RATED_BAD,
            "blocker",
            f"are calls of traces that are scored {say_bad_score(facts.settings)}",
            "trained on as they are, such rows teach the model what its judges rejected",
            say_fix("drop_rated_bad", on=True, done="drops these"),
        ),
        (
            RETRIED,
            "info",
            "were asked again by their agent in the same trace",
            "the agent did not use these answers; they look like contradictions",
            "`graft data prepare` keeps the last answer",
        ),
    )
    for code, severity, what, effect, fix in wordings:
        positions = [
            position for position, why in sorted(facts.corpus.withdrawn.items()) if why.startswith(code)
        ]
        if positions:
            yield Finding(
                code=code,
                severity=severity,
                count=len(positions),
                rows=facts.origins(positions[:MOST_ROWS]),
                title=count_rows(len(positions), what),
                effect=effect,
                fix=fix,
            )
