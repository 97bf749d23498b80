"""Small whole records for the contract tests."""

import hashlib
from typing import Any

from graftwork.records.interaction import Capture
from graftwork.records.release import Release
from graftwork.records.report import Decision

PROJECT = "cited-answers"
WHEN = "2025-03-01T12:00:00Z"


def release(name: str, *, project: str = PROJECT, decision: Decision = "deploy") -> Release:
    """A release whose id follows from its name."""
    return Release(
        id=hashlib.sha256(name.encode()).hexdigest(),
        project=project,
        base="small",
        base_fingerprint="b" * 64,
        template_fingerprint="t" * 64,
        adapter_hash="a" * 64,
        dataset_hash="d" * 64,
        plan_hash="p" * 64,
        report_hash="r" * 64,
        verdict_hash="v" * 64,
        decision=decision,
        run_id=name,
        parent=None,
        created_at=WHEN,
        files=(),
        settings={"note": "naïve \u0000 text"},
        versions={"graftwork": "0"},
    )


def capture(
    name: str, *, question: str = "Where?", reply: str = "Here.", by: str = "base", **more: Any
) -> Capture:
    return Capture(
        id=name,
        at=WHEN,
        session=None,
        model="champion",
        release=by,
        request={"messages": [{"role": "user", "content": question}], "temperature": 0},
        reply=reply,
        finish_reason="stop",
        prompt_tokens=3,
        reply_tokens=2,
        first_token_ms=1.5,
        total_ms=20.25,
        **more,
    )
