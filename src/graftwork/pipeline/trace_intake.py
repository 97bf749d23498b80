"""Calls of models in traces as exchanges for the captures.

In: a request in the form of OTLP JSON. Out: exchanges with the same id for the same span, so that a batch
that is sent again is kept once. Calls that failed have nothing to learn from and are left out.
"""

import hashlib
import time
from datetime import datetime
from typing import Any

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.trace_formats import read_otlp
from graftwork.records.interaction import Interaction, Origin
from graftwork.serve.captures import ServedExchange
from graftwork.serve.otlp import BadTrace, TracedCalls

_ORIGIN = Origin(file="/v1/traces", line=1)
UNKNOWN_MODEL = "unknown"


def read_traces(row: dict[str, Any]) -> TracedCalls:
    try:
        found = read_otlp(row, _ORIGIN)
    except (BadRow, RecursionError) as error:
        raise BadTrace(str(error) or "the request is nested too deeply") from None
    faults = [result for result in found if isinstance(result, ReadFault)]
    calls = [result for result in found if isinstance(result, Interaction) and result.reply]
    why = faults[0].message if faults else ""
    return TracedCalls([_to_exchange(call) for call in calls], len(faults), why)


def _to_exchange(call: Interaction) -> ServedExchange:
    request: dict[str, Any] = {"messages": [turn.model_dump() for turn in call.messages]}
    if call.max_tokens is not None:
        request["max_tokens"] = call.max_tokens
    identity = hashlib.sha256(f"{call.trace}\0{call.id}".encode(errors="replace")).hexdigest()
    return ServedExchange(
        id=identity[:32],
        at=_moment(call),
        session=call.session,
        model=call.group or call.extra.get("service") or "traced",
        release=call.model or UNKNOWN_MODEL,
        request=request,
        reply=call.reply,
        finish_reason=call.finish_reason,
        prompt_tokens=call.prompt_tokens or 0,
        reply_tokens=call.reply_tokens or 0,
        first_token_ms=call.first_token_ms,
        total_ms=call.duration_ms or 0.0,
        trace=call.trace,
        cost=call.cost,
        cached_tokens=call.cached_tokens,
        size=sum(len(turn.content) for turn in call.messages) + len(call.reply),
    )


def _moment(call: Interaction) -> float:
    stated = call.extra.get("timestamp")
    return datetime.fromisoformat(stated).timestamp() if isinstance(stated, str) else time.time()
