"""Wrong labels are estimated with an interval, and the rows to review are found."""

import json
import random

import pytest
from data_rows import make_row
from memory_corpus import audit_rows

from graftwork.data.audit.labels import find_labels, wilson

WORDS = {
    "billing": ["invoice", "charged", "twice", "refund", "payment", "card", "amount", "receipt", "tax"],
    "login": ["password", "reset", "account", "locked", "sign", "two", "factor", "code", "email", "access"],
    "shipping": ["parcel", "delivery", "late", "tracking", "courier", "address", "warehouse", "arrived"],
    "hardware": ["screen", "battery", "broken", "cable", "charger", "device", "overheats", "noise", "fan"],
    "software": ["crash", "update", "install", "version", "freezes", "error", "window", "button", "app"],
    "legal": ["contract", "privacy", "deletion", "request", "terms", "data", "consent", "signature"],
}
FILLER = [
    "hello", "please", "help", "since", "yesterday", "our", "team", "we", "cannot", "thanks", "urgent",
    "order", "customer", "again", "the",
]  # fmt: skip
SLOW = pytest.mark.slow
PRIORITIES = ("low", "normal", "high")


def tickets(count=300, *, wrong=0.08, seed=1, form="json"):
    """Rows, and the lines whose queue is wrong."""
    chance = random.Random(seed)
    planted = set(chance.sample(range(count), round(wrong * count)))
    rows = []
    for number in range(count):
        queue = chance.choice(list(WORDS))
        reported = [*chance.sample(WORDS[queue], 3), *chance.sample(FILLER, 6)]
        # Some words of another queue: real tickets are not clean either.
        reported += chance.sample(WORDS[chance.choice(list(WORDS))], 1)
        chance.shuffle(reported)
        output = chance.choice([name for name in WORDS if name != queue]) if number in planted else queue
        fields = {"queue": output, "priority": chance.choice(PRIORITIES), "summary": " ".join(reported[:4])}
        reply = json.dumps(fields) if form == "json" else output
        rows.append(make_row(f"Ticket {number}: {' '.join(reported)}", reply, line=number + 1))
    return rows, {number + 1 for number in planted}


def queue_noise(found):
    return next(field for field in found.label_noise.fields if field.field in ("queue", None))


@pytest.mark.parametrize(
    ("seed", "form"),
    [(1, "json"), (2, "plain"), *(pytest.param(3, form, marks=SLOW) for form in ("json", "plain"))],
)
def test_eight_percent_of_wrong_labels_are_estimated_and_half_of_them_listed(seed, form):
    rows, planted = tickets(seed=seed, form=form)
    found = audit_rows(rows)
    noise = queue_noise(found)
    assert noise.rate.low <= 0.08 <= noise.rate.high
    assert noise.rate.high < 0.25
    listed = [suspiciou for suspiciou in found.label_noise.suspicious if suspiciou.field in ("queue", None)]
    assert len(planted & {label.origin.line for label in listed[:36]}) >= len(planted) / 2
    assert "label_noise" in {finding.code for finding in found.findings}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2, 3))])
def test_labels_of_one_class_that_were_written_for_another_are_in_the_interval_and_found(seed):
    rows, _ = tickets(wrong=0.0, seed=seed, form="plain")
    billing = [place for place, row in enumerate(rows) if row.reply == "billing"]
    for place in random.Random(100 + seed).sample(billing, min(22, len(billing))):
        rows[place] = rows[place].model_copy(update={"reply": "login"})
    found = audit_rows(rows)
    rate = queue_noise(found).rate
    assert rate.low > 0
    assert rate.high >= 22 / 300
    assert "label_noise" in {finding.code for finding in found.findings}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in (2, 3))])
def test_a_clean_log_has_about_no_wrong_labels(seed):
    rows, _ = tickets(wrong=0.0, seed=seed)
    found = audit_rows(rows)
    assert queue_noise(found).rate.value <= 0.02
    assert queue_noise(found).rate.low == 0 or queue_noise(found).rate.value < 0.02
    assert "label_noise" not in {finding.code for finding in found.findings}


def test_a_field_that_the_prompt_does_not_determine_is_not_estimated_and_says_why():
    rows, _ = tickets()
    noise = audit_rows(rows).label_noise
    assert "priority" in noise.not_estimated
    assert "do not predict" in noise.not_estimated["priority"]
    assert [field.field for field in noise.fields] == ["queue"]


def test_shuffled_labels_are_not_estimated_but_named():
    rows, _ = tickets(form="plain")
    replies = [row.reply for row in rows]
    random.Random(1).shuffle(replies)
    shuffled = [row.model_copy(update={"reply": reply}) for row, reply in zip(rows, replies, strict=True)]
    noise = audit_rows(shuffled).label_noise
    assert noise.fields == ()
    assert "most labels are wrong" in noise.why_not


def test_free_text_is_not_estimated_and_says_why():
    rows = [make_row(f"What about {n}?", f"It is number {n} of them.", line=n + 1) for n in range(100)]
    noise = audit_rows(rows).label_noise
    assert noise.fields == ()
    assert "free text" in noise.why_not
    assert noise.suspicious == ()


def test_few_rows_are_not_estimated_and_say_why():
    rows, _ = tickets(20)
    assert "too few" in audit_rows(rows).label_noise.why_not


def test_a_near_duplicate_with_another_label_is_named():
    rows, _ = tickets(wrong=0.0, form="plain")
    twin = rows[0].messages[-1].content.replace("Ticket 0", "Ticket 777")
    other = next(name for name in WORDS if name != rows[0].reply)
    rows.append(make_row(twin, other, line=301))
    found = audit_rows(rows)
    listed = {suspiciou.origin.line: suspiciou for suspiciou in found.label_noise.suspicious}
    assert listed[301].near is not None
    assert listed[301].near.line == 1
    assert listed[301].suggested == rows[0].reply
    assert queue_noise(found).contradictions >= 1


def test_labels_are_distinguished_from_free_text():
    assert isinstance(find_labels(["yes", "no"] * 40), dict)
    assert isinstance(find_labels(['```json\n{"a": 1}\n```', '{"a": 2}'] * 40), dict)
    assert find_labels(["same"] * 80) == "all replies are the same"
    assert "JSON" in find_labels([json.dumps({"a": n}) for n in range(80)])


def test_an_interval_without_a_single_error_starts_at_zero():
    none = wilson(0, 150)
    assert none.value == none.low == 0
    assert 0 < none.high < 0.03
