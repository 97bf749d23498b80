import json
from pathlib import Path

import pytest
from data_rows import SECRET, THINGS, WordRenderer, chat, write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.leak import require_no_leak
from graftwork.data.prepare import prepare
from graftwork.data.settings import DataSettings
from graftwork.files.dataset_folder import read_manifest, read_rows
from graftwork.records.dataset import SPLITS, Row
from graftwork.records.errors import AnswerIsNo, Damaged, UserMistake
from graftwork.records.interaction import Message, Origin

ASKS = ("What does the {} cost?", "Who made our {} in 1950?", "Where can one borrow any {} on Sundays?")


def good_rows():
    return [
        chat(ask.format(thing), f"Number {n} answer on the {thing}.", status="success")
        for n, ask in enumerate(ASKS)
        for thing in THINGS
    ]


def run(tmp_path, rows=None, renderer=None, **changes):
    if rows is not None:
        write_log(tmp_path / "log.jsonl", rows)
    return prepare(
        DataSettings(logs=("log.jsonl",), validation=0.2, test=0.3, **changes),
        base="base",
        base_fingerprint="f",
        renderer=renderer or WordRenderer(),
        out=tmp_path / "out",
        root=tmp_path,
    )


def all_rows(folder):
    return [row for split in SPLITS for row in read_rows(folder, split)]


def test_every_row_is_either_kept_or_dropped_with_a_reason(tmp_path):
    rows = [
        *good_rows(),
        good_rows()[0],
        chat("Is it open?", "Mock response"),
        chat("Is it closed?", '{"answer": "it is cl'),
        chat("Is it far?", "It is.", status="error"),
        chat("What is the time?", "Noon."),
        chat("What is the time?", "Midnight, by the tower clock."),
        chat("Say much", "word " * 60 + "end."),
        {"nothing": "here"},
    ]
    dataset, folder = run(tmp_path, rows, max_tokens=40)
    assert {(drop.origin.line - 42, drop.step) for drop in dataset.drops} == {
        (1, "duplicate"),
        (2, "filter"),
        (3, "filter"),
        (4, "filter"),
        (5, "conflicting_answers"),
        (7, "render"),
        (8, "read"),
    }
    assert all(drop.reason for drop in dataset.drops)
    assert len(all_rows(folder)) + len(dataset.drops) == len(rows) == dataset.inputs[0].rows
    assert dataset.kept_after["render"] == len(all_rows(folder))
    assert any(drop.reason.startswith("overlong: ") for drop in dataset.drops)


def test_the_trained_span_is_the_reply(tmp_path):
    _, folder = run(tmp_path, good_rows())
    for row in all_rows(folder):
        assert len(row.tokens) - row.trained_from == len(row.reply.split()) + 1


def test_the_manifest_says_what_the_files_hold(tmp_path):
    dataset, folder = run(tmp_path, good_rows())
    assert read_manifest(folder) == dataset
    assert folder.name == dataset.content_hash
    for split in SPLITS:
        rows = read_rows(folder, split)
        summary = dataset.splits[split]
        assert summary.rows == len(rows) == len(dataset.lengths[split])
        assert summary.tokens == sum(len(row.tokens) for row in rows)
        assert summary.longest == max(len(row.tokens) for row in rows)


def test_the_same_logs_give_the_same_bytes(tmp_path):
    first, folder = run(tmp_path, good_rows())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    second, again = run(tmp_path)
    assert (first, folder) == (second, again)
    assert before == {path.name: path.read_bytes() for path in again.iterdir()}
    assert [path.name for path in (tmp_path / "out").iterdir()] == [folder.name]


def test_no_planted_secret_is_in_any_file(tmp_path):
    rows = good_rows()
    rows[3] = chat(
        f"My token is {SECRET}, why?", f"Since {SECRET} is old. Ask ann@firm.example.", session=SECRET
    )
    rows.append(chat("Is that so?", "Yes.", status=f"failed with {SECRET}"))
    dataset, folder = run(tmp_path, rows)
    for path in folder.iterdir():
        assert SECRET not in path.read_text()
        assert "ann@firm" not in path.read_text()
    assert dataset.redactions == {"email": 1, "github_token": 3}


def test_the_system_prompt_is_replaced_where_the_settings_say_so(tmp_path):
    _, folder = run(tmp_path, good_rows(), system_prompt="Answer from the sources.")
    for row in all_rows(folder):
        assert row.messages[0] == Message(role="system", content="Answer from the sources.")
        assert [message.role for message in row.messages] == ["system", "user"]


def test_ids_are_unique_even_where_the_log_repeats_its_own(tmp_path):
    _, folder = run(tmp_path, [{**row, "id": "1"} for row in good_rows()])
    ids = [row.id for row in all_rows(folder)]
    assert len(set(ids)) == len(ids)


def test_a_changed_file_is_noticed(tmp_path):
    _, folder = run(tmp_path, good_rows())
    path = folder / "test.jsonl"
    path.write_bytes(path.read_bytes().replace(b"answer", b"Answer", 1))
    with pytest.raises(Damaged, match="other bytes"):
        read_rows(folder, "test")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"base"', '"best"', 1))
    with pytest.raises(Damaged):
        read_manifest(folder)


def test_too_few_rows_are_a_no_with_the_numbers(tmp_path):
    with pytest.raises(AnswerIsNo, match="no row is left") as caught:
        run(tmp_path, good_rows()[:1])
    assert "1 after read" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_no_logs_are_the_users_mistake(tmp_path):
    with pytest.raises(UserMistake, match="no log file"):
        prepare(DataSettings(), base="b", base_fingerprint="f", renderer=WordRenderer(), out=tmp_path / "out")


class Refusing(WordRenderer):
    def __init__(self, word):
        self.word = word

    def render(self, messages, reply):
        if self.word in messages[-1].content:
            raise UserMistake("the reply cannot be shown to be what is trained", where="row")
        return super().render(messages, reply)


def test_a_row_that_the_template_refuses_is_dropped_and_all_of_them_are_a_mistake(tmp_path):
    dataset, _ = run(tmp_path, good_rows(), renderer=Refusing("zither"))
    assert [drop.reason for drop in dataset.drops] == [
        "refused by the template: the reply cannot be shown to be what is trained"
    ] * len(ASKS)
    with pytest.raises(UserMistake, match="cannot be shown"):
        run(tmp_path, renderer=Refusing(""))


def test_progress_is_reported_by_step(tmp_path):
    write_log(tmp_path / "log.jsonl", good_rows())
    seen = []
    prepare(
        DataSettings(logs=("log.jsonl",), validation=0.2, test=0.3),
        base="b",
        base_fingerprint="f",
        renderer=WordRenderer(),
        out=tmp_path / "out",
        root=tmp_path,
        on_progress=lambda step, done, total: seen.append((step, done, total)),
    )
    assert seen[0][0] == "read"
    assert ("render", 42, 42) in seen
    assert all(done <= total for _, done, total in seen)


def test_a_leak_is_refused_whoever_made_the_splits():
    def row(question, line):
        return Row(
            id=str(line),
            origin=Origin(file="x", line=line),
            messages=(Message(role="user", content=question),),
            reply="r",
            tokens=(1, 2),
            trained_from=1,
        )

    train, test = row("Where is the old oak psaltery kept?", 1), row("where is the old oak psaltery kept", 2)
    with pytest.raises(AnswerIsNo, match="train and in test"):
        require_no_leak({"train": [train], "validation": [], "test": [test]}, threshold=0.7)
    require_no_leak({"train": [train, test], "validation": [], "test": [row("Who?", 3)]}, threshold=0.7)


QUESTION = st.lists(st.sampled_from([*THINGS, "where", "is", "the", "old"]), min_size=1, max_size=5).map(
    " ".join
)


@given(st.lists(st.tuples(QUESTION, QUESTION), min_size=1, max_size=25))
@settings(max_examples=40, deadline=None)
def test_whatever_is_logged_no_question_stands_in_two_splits(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("any")
    try:
        _, made = run(folder, [chat(question, reply) for question, reply in pairs])
    except AnswerIsNo as error:
        if "no row is left" in error.what:
            return
        raise
    seen: dict[str, str] = {}
    for split in SPLITS:
        for row in read_rows(made, split):
            question = row.messages[-1].content
            assert seen.setdefault(question, split) == split


def test_rows_are_written_one_a_line(tmp_path):
    _, folder = run(tmp_path, good_rows())
    lines = Path(folder / "train.jsonl").read_text().splitlines()
    assert all(json.loads(line)["origin"]["file"] == "log.jsonl" for line in lines)
