"""The graft.yaml that a new project starts from: what was found in its log, each setting with its reason.

In: a Proposal, or nothing where there is no log yet. Out: YAML with comments. Pure.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from graftwork.project.propose import KINDS, Proposal
from graftwork.records.plan import DeviceFacts

HEAD = """\
# yaml-language-server: $schema=graft.schema.json
# `graft schema > graft.schema.json` lets your editor complete and check this file.
"""
STARTER = (
    HEAD
    + """\
# `graft init LOG` reads your log and proposes metrics and rules that fit it; this file is without them.
project: {name}
base: smollm2-135m-instruct     # the embedded model; or the path of a model folder

data:
  logs: [{logs}]
  # system_prompt: |            # in place of the logged one
  #   You answer in JSON …
  test: 0.2                     # share of the question groups that is held out
  validation: 0.1

train:
  rank: 8
  alpha: 16
  epochs: 2
  learning_rate: 5.0e-4
  # upper_layers: 15            # adapt only the upper layers: faster on a processor

evaluate:
  max_new_tokens: 96

gate:                           # rates are held by the lower bound of their interval
  rules:
    - {{metric: json_valid, over: 0.95}}
  primary: answer_match         # and here it must beat the base

serve:
  port: 8080
"""
)
COMMENT_AT = 44
FEW_ROWS, MANY_ROWS = 400, 800
MOST_VISITED = 1200
"""Rows that a processor trains on in some tens of minutes."""


def write_starter(*, name: str, logs: str) -> str:
    """Without a log: the keys that one changes first."""
    return STARTER.format(name=_flow(name), logs=_flow(logs))


def write_proposal(
    proposal: Proposal, *, name: str, logs: Sequence[str], device: DeviceFacts, base: str
) -> str:
    """What the log asks for, with the reason behind each setting."""
    lines = [
        f"# {KINDS[proposal.kind]}: {proposal.kind_why}.",
        f"project: {_flow(name)}",
        _line(f"base: {_flow(base)}", "the base model: embedded, or the path of a model folder"),
        "",
        *_data(proposal, logs),
        "",
        *_train(proposal, device),
        "",
        *_evaluate(proposal),
        "",
        *_gate(proposal),
        "",
        "serve:",
        "  port: 8080",
    ]
    return HEAD + "\n".join(lines) + "\n"


def _data(proposal: Proposal, logs: Sequence[str]) -> list[str]:
    size = proposal.size
    longest = _round_up(size.longest + (8 if size.counted else size.longest // 2), 32)
    counted = "counted" if size.counted else "estimated"
    shape = [f"  # {proposal.format_why}"]
    if proposal.format:
        shape = [_line(f"  format: {proposal.format}", proposal.format_why)]
    return [
        "data:",
        f"  logs: {_flow(list(logs))}",
        *shape,
        _line(f"  test: {proposal.test:g}", f"about {proposal.test_cases} cases: {proposal.test_why}"),
        "                                            # in four runs of five (80 % power)",
        _line("  validation: 0.06", "to see whether rows are learned by heart"),
        _line(f"  max_tokens: {longest}", f"the longest row has {size.longest} tokens ({counted})"),
    ]


def _train(proposal: Proposal, device: DeviceFacts) -> list[str]:
    rows = round(proposal.rows * (1 - proposal.test - 0.06))
    epochs = 3 if rows <= FEW_ROWS else 2 if rows <= MANY_ROWS else 1
    if device.kind != "cpu":
        return [
            "train:",
            _line("  rank: 16", f"{device.name}: all layers are adapted"),
            "  alpha: 32",
            _line("  epochs: 3", f"about {rows} rows to learn from"),
            "  batch_rows: 16",
            _line("  learning_rate: 1.0e-3", "for a small base; 2e-4 for one of 7B"),
        ]
    lines = [
        "train:",
        _line("  rank: 16", "small enough for a few hundred rows"),
        "  alpha: 32",
        _line("  upper_layers: 15", f"no card here ({device.threads} threads): half the backward pass"),
        _line(f"  epochs: {epochs}", f"about {rows} rows to learn from"),
        "  batch_rows: 8",
        _line("  learning_rate: 2.0e-3", "for a small base with few steps"),
    ]
    if rows > MOST_VISITED:
        lines.append(
            _line(f"  max_rows: {MOST_VISITED}", "a budget of minutes on a processor; more is better")
        )
    return lines


def _evaluate(proposal: Proposal) -> list[str]:
    size = proposal.size
    tokens = _round_up(round(1.25 * size.longest_reply) + 4, 8)
    lines = [
        "evaluate:",
        _line(f"  max_new_tokens: {tokens}", f"the longest reply has {size.longest_reply} tokens"),
    ]
    if proposal.answer_fields:
        lines.append("  fields:")
        lines += [f"    {key}: {_flow(value)}" for key, value in proposal.answer_fields.items()]
    lines.append(_line(f"  metrics: {_flow(list(proposal.metrics))}", "of form; those of words by name"))
    reasons = {field.path: field.why for field in proposal.fields}
    if proposal.checks:
        lines.append("  checks:")
        lines += [
            _line(f"    - {_flow(check)}", reasons.get(str(check.get("field")), proposal.primary_why))
            for check in proposal.checks
        ]
    return lines


def _gate(proposal: Proposal) -> list[str]:
    lines = [
        "gate:",
        _line(f"  primary: {proposal.primary}", f"must beat the base: {proposal.primary_why}"),
        _line("  rules:", "the lower bound of each interval counts"),
    ]
    for rule in proposal.rules:
        lines.append(_line(f"    - {_flow({'metric': rule.metric, 'over': rule.over})}", rule.why))
    if not proposal.rules:
        lines.append(_line("    - {metric: truncated, under: 0.5}", "too few cases for more"))
    lines += [f"  # no rule on {told}" for told in proposal.left_out]
    if proposal.kind in ("text", "code"):
        lines.append(
            "  # Nearness is not correctness: name a judge (evaluate.judge), tests, or a metric of yours."
        )
    return lines


def _line(setting: str, why: str) -> str:
    """The setting with its reason, where the line is not too long for it behind, else above."""
    indent = " " * (len(setting) - len(setting.lstrip()))
    if len(setting) >= COMMENT_AT + 16:
        return f"{indent}# {why}\n{setting}"
    return f"{setting:<{COMMENT_AT - 1}} # {why}"


def _flow(value: Any) -> str:
    """A value on one line."""
    written = yaml.safe_dump(
        value, default_flow_style=True, width=100_000, sort_keys=False, allow_unicode=True
    )
    return written.removesuffix("...\n").strip()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
