"""Checks a configuration against all rules.

In: a configuration and its context. Out: findings, the most severe first, in the order of the
file. Pure; does not know where the figures came from.
"""

from collections.abc import Iterable

from graftwork.plan.lint import rules_memory, rules_precision, rules_training
from graftwork.plan.lint.facts import Around, Configuration, LintFinding, LintRule, RuleHit

RULES: tuple[LintRule, ...] = (
    *rules_training.SCHEDULE_RULES,
    *rules_training.BATCH_RULES,
    *rules_memory.MEMORY_RULES,
    *rules_precision.PRECISION_RULES,
    *rules_training.LEARNING_RULES,
    *rules_precision.PURPOSE_RULES,
)
GRAVITY = {"error": 0, "warning": 1, "note": 2}


def lint(said: Configuration, around: Around) -> tuple[LintFinding, ...]:
    return most_severe_first(_finding(rule, hit, said) for rule in RULES for hit in rule.check(said, around))


def most_severe_first(found: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    return tuple(sorted(found, key=lambda item: (GRAVITY[item.severity], _line(item.where))))


def _finding(rule: LintRule, hit: RuleHit, said: Configuration) -> LintFinding:
    fields = tuple(field.removeprefix("=") for field in hit.fields)
    direct = hit.fields[0].startswith("=")
    return LintFinding(
        rule=rule.id,
        severity=rule.severity,
        what=hit.what,
        why=hit.why,
        fix=hit.fix,
        where=said.where(*fields),
        key=fields[0] if direct else said.key(*fields),
        source=rule.source,
    )


def _line(where: str) -> int:
    tail = where.rsplit(":", 1)[-1]
    return int(tail) if tail.isdigit() else 0
