"""An audit of logged quality scores, before they may serve as rewards.

In: scores with the replies that they are about, and what the log says about their success. Out: findings that
make the scores useless: constant, independent of the reply, contradicting the status. Pure; the permutation
tests have a fixed seed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from graftwork.grading.answers import parse_json
from graftwork.records.base import Record
from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo
from graftwork.records.interaction import Interaction

LEAST_SCORES = 20
"""Fewer say nothing against chance."""
LEAST_FOR_INDEPENDENCE = 50
CONSTANT_SHARE = 0.98
LEAST_OF_A_STATUS = 5
PERMUTATIONS = 999
SIGNIFICANT = 0.05
FREQUENT_WORDS = 24
_WORD = re.compile(r"\w+")

FindingKind = Literal["few", "constant", "independent", "contradicts_status", "ignores_status"]
HARMLESS: frozenset[FindingKind] = frozenset({"ignores_status"})
"""Findings that do not forbid the use of scores."""


class ScoredReply(NamedTuple):
    score: float
    prompt: str
    reply: str
    failed: bool | None = None
    """What the log says about the reply; None where it says nothing."""

    @classmethod
    def of_row(cls, row: Row) -> "ScoredReply":
        assert row.reward is not None
        return cls(row.reward, row.messages[-1].content, row.reply)

    @classmethod
    def of_interaction(cls, row: Interaction) -> "ScoredReply":
        assert row.reward is not None
        failed = None if row.status is None else row.status != "success"
        return cls(row.reward, row.question, row.reply, failed)


class ScoreFinding(Record):
    kind: FindingKind
    says: str


class ScoreAudit(Record):
    scores: int
    least: float = 0.0
    most: float = 0.0
    mean: float = 0.0
    distinct: int = 0
    reply_p: float | None = None
    """How often shuffled scores fit the replies as well as these; small if scores depend on replies."""
    status_p: float | None = None
    findings: tuple[ScoreFinding, ...] = ()

    @property
    def usable(self) -> bool:
        return all(finding.kind in HARMLESS for finding in self.findings)

    def describe(self) -> str:
        shown = f"{self.scores} logged scores from {self.least:g} to {self.most:g}, {self.distinct} values"
        return "; ".join([shown, *(finding.says for finding in self.findings)])


def audit_scores(replies: Sequence[ScoredReply]) -> ScoreAudit:
    scores = [reply.score for reply in replies]
    if len(scores) < LEAST_SCORES:
        few = ScoreFinding(kind="few", says=f"{len(scores)} scores are too few: {LEAST_SCORES} are needed")
        return ScoreAudit(scores=len(scores), findings=(few,))
    counts = Counter(scores)
    value, count = counts.most_common(1)[0]
    findings = []
    reply_p = status_p = None
    if count >= CONSTANT_SHARE * len(scores):
        findings.append(ScoreFinding(kind="constant", says=f"{count} of {len(scores)} scores are {value:g}"))
    else:
        if len(scores) >= LEAST_FOR_INDEPENDENCE:
            reply_p = find_p_value(scores, [describe_reply(reply) for reply in replies])
            if reply_p > SIGNIFICANT:
                says = f"shuffled scores fit the replies as well (p = {reply_p:.2f})"
                findings.append(ScoreFinding(kind="independent", says=says))
        status_p, found = _compare_status(replies)
        findings += found
    return ScoreAudit(
        scores=len(scores),
        least=min(scores),
        most=max(scores),
        mean=sum(scores) / len(scores),
        distinct=len(counts),
        reply_p=reply_p,
        status_p=status_p,
        findings=tuple(findings),
    )


def require_usable(found: ScoreAudit) -> None:
    if not found.usable:
        raise AnswerIsNo(
            "the logged scores cannot serve as rewards",
            why="; ".join(finding.says for finding in found.findings),
            fix="run `graft data audit --scores`; grade replies with checks or a judge instead, or remove "
            "`preferences.least_score`",
            where="train.preferences.least_score",
        )


def _compare_status(replies: Sequence[ScoredReply]) -> tuple[float | None, list[ScoreFinding]]:
    """Whether failed replies have lower scores than others."""
    known = [reply for reply in replies if reply.failed is not None]
    failed = [reply.score for reply in known if reply.failed]
    fine = [reply.score for reply in known if not reply.failed]
    if min(len(failed), len(fine)) < LEAST_OF_A_STATUS:
        return None, []
    means = sum(failed) / len(failed), sum(fine) / len(fine)
    shown = f"failed replies have a mean score of {means[0]:.2f}, others {means[1]:.2f}"
    p = find_p_value([reply.score for reply in known], [{"failed": float(bool(r.failed))} for r in known])
    if means[0] >= means[1]:
        return p, [ScoreFinding(kind="contradicts_status", says=shown)]
    if p > SIGNIFICANT:
        return p, [ScoreFinding(kind="ignores_status", says=f"{shown}, which chance explains (p = {p:.2f})")]
    return p, []


def describe_reply(reply: ScoredReply) -> dict[str, float]:
    """What a reader would notice of a reply, as numbers; `word:` features count only if they are frequent."""
    text = reply.reply
    words = [word.lower() for word in _WORD.findall(text)]
    asked = {word.lower() for word in _WORD.findall(reply.prompt)}
    found = {
        "length": float(len(text)),
        "words": float(len(words)),
        "lines": float(text.count("\n")),
        "digits": sum(map(str.isdigit, text)) / max(len(text), 1),
        "punctuation": sum(not c.isalnum() and not c.isspace() for c in text) / max(len(text), 1),
        "different_words": len(set(words)) / max(len(words), 1),
        "words_of_prompt": len(asked & set(words)) / max(len(set(words)), 1),
        "code": float("```" in text),
        "json": float(bool(parse_json(text))),
        "prompt_length": float(len(reply.prompt)),
    }
    return found | {f"word:{word}": 1.0 for word in set(words)}


def find_p_value(scores: Sequence[float], features: Sequence[dict[str, float]]) -> float:
    """How often shuffled scores correlate with one of the features as strongly as these scores do."""
    import numpy as np

    # All but words; of words those that occur in about half of the replies, which say most.
    counts = Counter(name for feature in features for name in feature)
    words = [name for name in counts if name.startswith("word:")]
    words.sort(key=lambda name: (abs(counts[name] - len(features) / 2), name))
    names = [*(name for name in counts if not name.startswith("word:")), *words[:FREQUENT_WORDS]]
    columns = np.array([[feature.get(name, 0.0) for name in names] for feature in features], dtype=float)
    ranks = np.argsort(np.argsort(columns, axis=0, kind="stable"), axis=0, kind="stable").astype(float)
    # Equal values share a rank.
    for at in range(ranks.shape[1]):
        _, inverse = np.unique(columns[:, at], return_inverse=True)
        means = np.bincount(inverse, ranks[:, at]) / np.bincount(inverse)
        ranks[:, at] = means[inverse]
    table = _standardize(ranks)
    values = _standardize(np.array(scores, dtype=float)[:, None])[:, 0]
    chance = np.random.default_rng(11)
    observed = float(np.abs(values @ table).max())
    reached = sum(
        float(np.abs(chance.permutation(values) @ table).max()) >= observed - 1e-9
        for _ in range(PERMUTATIONS)
    )
    return (1 + reached) / (1 + PERMUTATIONS)


def _standardize(columns: Any) -> Any:
    import numpy as np

    centred = columns - columns.mean(axis=0)
    size = np.sqrt((centred**2).sum(axis=0))
    return centred / np.where(size > 0, size, 1.0)


def scored(rows: Iterable[Interaction]) -> list[ScoredReply]:
    """The replies of a log that have a score of their own."""
    return [ScoredReply.of_interaction(row) for row in rows if row.reward is not None]
