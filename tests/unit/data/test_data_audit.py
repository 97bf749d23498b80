import json

import pytest
from data_rows import SECRET, THINGS, WordRenderer, chat, write_log

from graftwork.data.audit import audit
from graftwork.data.prepare import prepare
from graftwork.data.rules.leak import expect_leaks
from graftwork.data.settings import DataSettings
from graftwork.records.errors import UserMistake


def good_rows():
    return [
        chat(f"What would I pay for the {thing} {n} times?", f"Some {n * 7} coins for the {thing}.")
        for n, thing in enumerate(THINGS)
    ]


def look(tmp_path, rows, **changes):
    write_log(tmp_path / "log.jsonl", rows)
    return audit(["log.jsonl"], DataSettings(**changes), root=tmp_path)


def finding(found, code):
    return next(f for f in found.findings if f.code == code)


def test_clean_logs_are_fit_to_train_on(tmp_path):
    found = look(tmp_path, good_rows())
    assert found.fit_to_train
    assert (found.rows, found.readable, found.usable) == (14, 14, 14)
    assert found.findings == ()
    assert found.reply_length.smallest > 0


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("placeholder", chat("Is it open?", "Mock response")),
        ("truncated", chat("Is it closed?", '{"answer": "it is cl')),
        ("failed_status", chat("Is it far?", "It is.", status="error")),
        ("claims_success_but_fails", chat("Is it near?", "HTTP 502 Bad Gateway", status="success")),
        ("empty", chat("Is it there?", "  ")),
        ("secret", chat("Is it safe?", f"Use {SECRET} for it.")),
    ],
)
def test_what_must_not_be_trained_on_blocks_and_names_its_mending(tmp_path, code, row):
    found = look(tmp_path, [*good_rows(), row])
    assert not found.fit_to_train
    blocker = finding(found, code)
    assert (blocker.severity, blocker.count) == ("blocker", 1)
    assert str(blocker.rows[0]) == "log.jsonl:15"
    assert blocker.examples[0].origin == blocker.rows[0]
    assert "graft data prepare" in blocker.fix
    assert blocker.effect
    assert found.usable == (15 if code == "secret" else 14)


def test_a_switched_off_setting_is_named_as_the_mending(tmp_path):
    found = look(tmp_path, [*good_rows(), chat("Is it open?", "Mock response")], drop_placeholders=False)
    assert "set data.drop_placeholders to true" in finding(found, "placeholder").fix
    assert found.usable == 15


def test_repeats_and_conflicts_are_told_apart(tmp_path):
    rows = good_rows()
    rows += [
        rows[0],
        chat("How long is it open?", "All day."),
        chat("How long is it open?", "Two hours only."),
    ]
    found = look(tmp_path, rows)
    assert [str(o) for o in finding(found, "duplicate").rows] == ["log.jsonl:15"]
    assert [o.line for o in finding(found, "conflicting_answers").rows] == [16, 17]
    assert found.fit_to_train


def test_a_random_split_would_leak_twins():
    assert expect_leaks([1, 1, 1], held_out=0.2) == 0
    assert expect_leaks([2], held_out=0.5) == pytest.approx(0.5)


def test_what_would_leak_is_named(tmp_path):
    ask = "Where do I find the oak psaltery{}"
    twins = [chat(ask.format(end), f"In room {n}.") for n, end in enumerate(["?", "? Thanks!", ", please?"])]
    found = look(tmp_path, [*good_rows(), *twins], test=0.5, validation=0.1)
    assert {o.line for o in finding(found, "split_leak").rows} == {15, 16, 17}


def test_no_finding_quotes_a_secret_or_an_address(tmp_path):
    rows = [
        *good_rows(),
        chat(f"Is {SECRET} safe?", f"Error: {SECRET} is bad", status=f"error {SECRET}"),
        chat("Write to ann@firm.example about it.", "TODO: ann@firm.example"),
        chat(f"What of {SECRET}?", '{"answer": "' + SECRET),
    ]
    written = look(tmp_path, rows).to_json()
    assert SECRET not in written
    assert "ann@firm" not in written


def test_rare_and_dominant_groups_are_named(tmp_path):
    rows = [{**row, "agent": {"role": "guide"}} for row in good_rows()]
    rows += [
        chat(f"Tell me all about {thing} history {n}", f"It began in {1500 + n}.", agent={"role": "guide"})
        for n, thing in enumerate(THINGS)
    ]
    rows.append(chat("Fix my bicycle", "Bring it in.", agent={"role": "shop"}))
    found = look(tmp_path, rows)
    assert finding(found, "rare_group").count == 1
    assert "guide" in finding(found, "imbalance").title
    assert found.groups == {"guide": 28, "shop": 1}


def test_unreadable_rows_are_counted_and_do_not_stop_the_audit(tmp_path):
    lines = [*(json.dumps(row) for row in good_rows()), "{broken", '{"what": 1}']
    (tmp_path / "log.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"a": "\xff"}\n')
    found = audit(["log.jsonl"], root=tmp_path)
    assert (found.rows, found.readable) == (17, 14)
    for code, line in (("parse_error", 15), ("schema", 16), ("encoding", 17)):
        assert [o.line for o in finding(found, code).rows] == [line]


def test_a_file_without_one_usable_row_is_not_fit(tmp_path):
    (tmp_path / "log.jsonl").write_text("{broken\n")
    found = audit(["log.jsonl"], root=tmp_path)
    assert not found.fit_to_train
    assert finding(found, "nothing_usable").severity == "blocker"


def test_an_empty_file_is_the_users_mistake(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(UserMistake, match="empty"):
        audit(["log.jsonl"], root=tmp_path)


def test_the_audit_and_the_preparation_agree(tmp_path):
    rows = [
        *good_rows(),
        good_rows()[1],
        chat("Is it open?", "Mock response"),
        chat("Why?", f"As {SECRET} says."),
    ]
    found = look(tmp_path, rows)
    dataset, _ = prepare(
        DataSettings(logs=("log.jsonl",), test=0.3, validation=0),
        base="b",
        base_fingerprint="f",
        renderer=WordRenderer(),
        out=tmp_path / "out",
        root=tmp_path,
    )
    assert found.usable == dataset.kept_after["near_duplicate"]


def test_the_core_audits_without_torch(tmp_path):
    import subprocess
    import sys

    path = write_log(tmp_path / "log.jsonl", good_rows())
    code = (
        "import sys; from graftwork.data.audit import audit; audit([sys.argv[1]]);"
        "bad = {'torch', 'transformers', 'tokenizers', 'numpy', 'sqlalchemy'} & set(sys.modules);"
        "sys.exit(repr(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
