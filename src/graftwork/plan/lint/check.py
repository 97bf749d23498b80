"""Checks a configuration against all rules.

In: a configuration and its context. Out: findings, the most severe first, in the order of the
file. Pure; does not know where the figures came from.
"""

from collections.abc import Iterable

from graftwork.plan.lint import rules_device, rules_learning, rules_training
from graftwork.plan.lint.facts import Configuration, LintContext, LintFinding, LintRule

RULES: tuple[LintRule, ...] = tuple(
    rule
    for module in (rules_training, rules_device, rules_learning)
    for rule in vars(module).values()
    if isinstance(rule, LintRule)
)
GRAVITY = {"error": 0, "warning": 1, "note": 2}


def lint(config: Configuration, context: LintContext) -> tuple[LintFinding, ...]:
    findings = []
    for rule in RULES:
        for hit in rule.check(config, context):
            fields = tuple(field.removeprefix("=") for field in hit.fields)
            direct = hit.fields[0].startswith("=")
            findings.append(
                LintFinding(
                    rule=rule.id,
                    severity=rule.severity,
                    what=hit.what,
                    why=hit.why,
                    fix=hit.fix,
                    where=config.where(*fields),
                    key=fields[0] if direct else config.key(*fields),
                    source=rule.source,
                )
            )
    return most_severe_first(findings)


def most_severe_first(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    def order(finding: LintFinding) -> tuple[int, int]:
        line = finding.where.rsplit(":", 1)[-1]
        return GRAVITY[finding.severity], int(line) if line.isdigit() else 0

    return tuple(sorted(findings, key=order))
