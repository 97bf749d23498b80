"""Checks a configuration against all rules.

In: a configuration and its context. Out: findings, the most severe first, in the order of the
file. Pure; does not know where the figures came from.
"""

from collections.abc import Iterable

from graftwork.plan.lint import rules_memory, rules_precision, rules_training
from graftwork.plan.lint.facts import Configuration, LintContext, LintFinding, LintRule, RuleHit

RULES: tuple[LintRule, ...] = (
    *rules_training.SCHEDULE_RULES,
    *rules_training.BATCH_RULES,
    *rules_memory.MEMORY_RULES,
    *rules_precision.PRECISION_RULES,
    *rules_training.LEARNING_RULES,
    *rules_training.REWARD_RULES,
    *rules_precision.PURPOSE_RULES,
)
GRAVITY = {"error": 0, "warning": 1, "note": 2}


def lint(config: Configuration, context: LintContext) -> tuple[LintFinding, ...]:
    return most_severe_first(
        _finding(rule, hit, config) for rule in RULES for hit in rule.check(config, context)
    )


def most_severe_first(found: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    return tuple(sorted(found, key=lambda item: (GRAVITY[item.severity], _line(item.where))))


def _finding(rule: LintRule, hit: RuleHit, config: Configuration) -> LintFinding:
    fields = tuple(field.removeprefix("=") for field in hit.fields)
    direct = hit.fields[0].startswith("=")
    return LintFinding(
        rule=rule.id,
        severity=rule.severity,
        what=hit.what,
        why=hit.why,
        fix=hit.fix,
        where=config.where(*fields),
        key=fields[0] if direct else config.key(*fields),
        source=rule.source,
    )


def _line(where: str) -> int:
    tail = where.rsplit(":", 1)[-1]
    return int(tail) if tail.isdigit() else 0
