"""Findings about traces: what is left out of their lines by which rule, and calls that were made again."""

from collections import Counter
from collections.abc import Iterator

from graftwork.data.audit.findings import MOST_ROWS, AuditFacts, count_rows, say_fix
from graftwork.data.audit.row_checks import RATED_BAD, RETRIED, say_bad_score
from graftwork.data.ingest.blocks import IN_OTHER_FILE
from graftwork.records.dataset import Finding
from graftwork.records.interaction import Origin

_RULES = {
    "no_content": "calls of models without recorded messages",
    IN_OTHER_FILE: "spans of calls whose messages are in log records",
    "no_reply": "calls of models without a recorded reply",
    "other_span": "spans of agents, tools and other work",
    "repeats_other_span": "spans of agents that repeat the calls below them",
    "other_call": "calls that are no chat, such as embeddings",
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
    for left in facts.corpus.left_out():
        counts[left.rule] += left.count
        named = rows[left.rule == _CONTENT]
        if len(named) < MOST_ROWS:
            named.append(left.origin)
    missing = counts.pop(_CONTENT, 0)
    if missing:
        yield Finding(
            code="no_content",
            severity="warning",
            count=missing,
            rows=tuple(rows[True]),
            title=f"{_count(missing, 'calls')} of models in the traces "
            f"{'has' if missing == 1 else 'have'} no content",
            effect="they cannot be learned from: the trace has times and tokens, and no messages",
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
            f"{'is no row' if total == 1 else 'are no rows'}: {listed}",
            effect="only calls of models with a reply become rows: one for each reply",
            fix="nothing needs to be done",
        )


def _count(count: int, what: str) -> str:
    """`1 span of agents`, `2 replies after pictures`: `what` begins with the plural noun."""
    noun, space, rest = what.partition(" ")
    if count == 1:
        noun = f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")
    return f"{count:,} {noun}{space}{rest}"


def find_rated_traces(facts: AuditFacts) -> Iterator[Finding]:
    bad = [place for place, why in sorted(facts.corpus.withdrawn.items()) if why.startswith(RATED_BAD)]
    if bad:
        yield Finding(
            code=RATED_BAD,
            severity="blocker",
            count=len(bad),
            rows=facts.origins(bad[:MOST_ROWS]),
            title=count_rows(
                len(bad), f"are calls of traces that are scored {say_bad_score(facts.settings)}"
            ),
            effect="trained on as they are, such rows teach the model what its judges refused",
            fix=say_fix("drop_rated_bad", on=True, done="drops these"),
        )


def find_retried(facts: AuditFacts) -> Iterator[Finding]:
    retried = [place for place, why in sorted(facts.corpus.withdrawn.items()) if why.startswith(RETRIED)]
    if retried:
        yield Finding(
            code=RETRIED,
            severity="info",
            count=len(retried),
            rows=facts.origins(retried[:MOST_ROWS]),
            title=count_rows(len(retried), "were asked again by their agent in the same trace"),
            effect="the agent did not use these answers; they look like contradictions",
            fix="`graft data prepare` keeps the last answer",
        )
