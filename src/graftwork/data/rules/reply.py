"""Replies that are no answers: empty, a stand-in, cut off; and prompts that are made up."""

from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import (
    count_rows,
    make_finding,
    mend,
    show_around,
    show_end,
    show_question,
    show_start,
)
from graftwork.records.audit import Finding
from graftwork.text.shape import find_stand_in, holds_stand_in


def find(log: Log) -> Iterator[Finding]:
    yield from _find_empty(log)
    yield from _find_placeholders(log)
    yield from _find_truncated(log)
    yield from _find_made_up_prompts(log)


def _find_empty(log: Log) -> Iterator[Finding]:
    hits = [(row.origin, f"{reason}: {show_question(row)}") for row, reason in log.with_fault("empty")]
    if hits:
        yield make_finding(
            "empty",
            "blocker",
            hits,
            title=count_rows(len(hits), "have no question or no reply"),
            effect="trained on, they teach the model to say nothing",
            fix="`graft data prepare` drops these always",
        )


def _find_placeholders(log: Log) -> Iterator[Finding]:
    hits = [
        (row.origin, f"{reason}: {show_start(row.reply)}") for row, reason in log.with_fault("placeholder")
    ]
    if hits:
        yield make_finding(
            "placeholder",
            "blocker",
            hits,
            title=count_rows(len(hits), "have a stand-in where the answer belongs"),
            effect="trained on, they teach the model to answer with stand-ins",
            fix=mend("drop_placeholders", on=log.settings.drop_placeholders, done="drops these"),
        )


def _find_truncated(log: Log) -> Iterator[Finding]:
    hits = [(row.origin, f"{reason}: {show_end(row.reply)}") for row, reason in log.with_fault("truncated")]
    if hits:
        yield make_finding(
            "truncated",
            "blocker",
            hits,
            title=count_rows(len(hits), "are cut off before the end of the reply"),
            effect="trained on, they teach the model to stop in the middle",
            fix=mend("drop_truncated", on=log.settings.drop_truncated, done="drops these")
            + "; raise the token limit where they were logged",
        )


def _find_made_up_prompts(log: Log) -> Iterator[Finding]:
    hits = [
        (row.origin, show_around(row.question, "["))
        for row, _ in log.rows
        if holds_stand_in(row.question) and not find_stand_in(row.reply)
    ]
    if hits:
        yield make_finding(
            "placeholder_prompt",
            "warning",
            hits,
            title=count_rows(len(hits), "have made-up content in the prompt"),
            effect="the reply cannot follow from such a prompt: the model learns to invent",
            fix="log the real content, or leave these rows out of the file",
        )
