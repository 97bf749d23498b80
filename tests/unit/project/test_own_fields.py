"""`graft init` lists the own fields of a log, and maps those that it understands."""

import json

import pytest

from graftwork.project.init import data_settings, find_own_fields, start_project
from graftwork.project.load import load_settings
from graftwork.records.interaction import Interaction, Message, Origin


def write_tickets(folder, **fields):
    words = ("bike", "helmet", "lock", "pump", "chain", "saddle", "wheel", "brake")
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"What about {words[n % 8]} number {n * n} of the shop in street {n}?",
                },
                {
                    "role": "assistant",
                    "content": f"The {words[n % 8]} costs {n * 7} and arrives in week {n}.",
                },
            ],
            **{name: choose(n) for name, choose in fields.items()},
        }
        for n in range(80)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return start_project(folder, [str(folder / "log.jsonl")], base="smollm2-135m-instruct")


def test_init_lists_the_fields_of_chat_rows_and_maps_status_session_and_score(tmp_path):
    started = write_tickets(
        tmp_path,
        outcome=lambda n: "error" if n % 10 == 0 else "ok",
        conversation=lambda n: f"c{n // 2}",
        stars=lambda n: 1 + n % 5,
        ts=lambda n: f"2026-11-{1 + n % 28:02}T10:00:00Z",
        customer_id=lambda n: f"u{n % 9}",
        cost_usd=lambda n: 0.001 * n,
        shop=lambda n: "north",
    )
    taken = {field.name: field.taken_for for field in started.fields}
    assert taken == {
        "outcome": "status",
        "conversation": "session",
        "stars": "score",
        "ts": "time",
        "customer_id": "user",
        "cost_usd": "cost",
        "shop": "nothing",
    }
    data = load_settings(tmp_path / "graft.yaml").data
    assert (data.mapping.status, data.mapping.session, data.mapping.reward) == (
        "outcome",
        "conversation",
        "stars",
    )
    assert data.rated_bad_below == 3
    assert data.keep is None
    good = sum(n % 10 != 0 and n % 5 >= 2 for n in range(80))
    assert started.proposal.rows <= good


@pytest.mark.parametrize(
    ("name", "values", "settings"),
    [
        ("rating", (0, 0, 0, 5), {}),
        ("rating", (-1, 1), {"mapping": {"reward": "rating"}}),
        ("rating", (1, 2, 4, 10), {"mapping": {"reward": "rating"}, "rated_bad_below": 5.5}),
        ("thumbs", ("up", "down"), {}),
        ("outcome", ("resolved", "escalated"), {}),
        ("outcome", ("resolved", "failed"), {"mapping": {"status": "outcome"}}),
    ],
)
def test_a_field_is_mapped_only_where_its_values_are_understood(name, values, settings):
    rows = [
        Interaction(
            id=str(n),
            origin=Origin(file="log.jsonl", line=n + 1),
            messages=(Message(role="user", content=f"{n}?"),),
            reply="Yes.",
            extra={name: values[n % len(values)]},
        )
        for n in range(40)
    ]
    assert data_settings(rows, find_own_fields(rows, formats=("chat",))) == settings
    assert data_settings(rows, find_own_fields(rows, formats=("otlp",))) == {}
