"""Which replies of a conversation are trained on: the last, every one, those that the log marks."""

import pytest
from data_rows import WordRenderer, write_log

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.read import read_file
from graftwork.data.prepare import PrepareJob, prepare
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import iterate_drops, read_rows

WORDS = ("oak", "elm", "ash", "yew", "fir", "box", "bay", "fig", "nut", "pea")


def talk(name, *weights, **more):
    """A conversation in which the n-th reply has the n-th weight; None states none."""
    messages = []
    for number, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"what about {name} part {number} of it"})
        reply = {"role": "assistant", "content": f"{name} {number} answered"}
        messages.append(reply if weight is None else {**reply, "weight": weight})
    return {"messages": messages, **more}


def train(tmp_path, rows, **settings):
    """The replies that are trained on, and the reasons of dropped rows."""
    write_log(tmp_path / "log.jsonl", rows)
    data = DataSettings(logs=("log.jsonl",), validation=0, test=0, **settings)
    job = PrepareJob(
        context=AuditContext(settings=data),
        base="words",
        base_fingerprint="f",
        renderer=WordRenderer(),
        work=tmp_path / "work",
        out=tmp_path / "out",
        root=tmp_path,
    )
    (tmp_path / "work").mkdir()
    (made,) = prepare(job, processes=1).datasets
    replies = [row.reply for row in read_rows(made.folder, "train")]
    return sorted(replies), [drop.reason for drop in iterate_drops(made.folder)]


def read_one(tmp_path, row):
    write_log(tmp_path / "one.jsonl", [row])
    (found,) = read_file("one.jsonl", root=tmp_path)
    return found


def test_a_turn_with_weight_0_is_context_and_never_the_reply(tmp_path):
    found = read_one(tmp_path, talk("oak", 1, None, 0))
    assert found.reply == "oak 1 answered"
    assert found.turn_weights == (1.0, None)


def test_rows_without_weights_are_read_as_before(tmp_path):
    assert read_one(tmp_path, talk("oak", None, None)).turn_weights is None


@pytest.mark.parametrize(("stated", "read"), [(True, 1.0), (False, 0.0), (0.5, 1.0), ("heavy", None)])
def test_weights_of_other_kinds_lose_no_row(tmp_path, stated, read):
    found = read_one(tmp_path, talk("oak", stated, 1))
    assert found.turn_weights == (read, 1.0)


def test_a_row_whose_replies_all_have_weight_0_says_so(tmp_path):
    found = read_one(tmp_path, talk("oak", 0, 0))
    assert isinstance(found, ReadFault)
    assert "nothing is left to train on" in found.message


def test_sharegpt_turns_have_weights_too(tmp_path):
    turns = [
        {"from": "human", "value": "what?"},
        {"from": "gpt", "value": "this.", "weight": 0},
        {"from": "human", "value": "and?"},
        {"from": "gpt", "value": "that."},
    ]
    assert read_one(tmp_path, {"conversations": turns}).turn_weights == (0.0, None)


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        ("last", ["ash 1 answered", "elm 0 answered", "oak 2 answered"]),
        ("every", ["ash 0 answered", "ash 1 answered", "elm 0 answered", "oak 0 answered", "oak 2 answered"]),
        ("marked", ["elm 0 answered", "oak 0 answered"]),
    ],
)
def test_each_way_of_training_respects_the_weights(tmp_path, train_on, trained):
    rows = [talk("oak", 1, 0, None), talk("elm", 1, 0), talk("ash", None, None)]
    replies, dropped = train(tmp_path, rows, train_on=train_on)
    assert replies == trained
    assert len(dropped) == (1 if train_on == "marked" else 0)
    assert all("no reply is marked" in reason for reason in dropped)


def test_a_conversation_that_is_split_by_turn_leaves_out_what_has_weight_0(tmp_path):
    rows = [talk("oak", None, 0, None), talk("elm", None)]
    replies, _ = train(tmp_path, rows, overlong="split_by_turn", max_tokens=30)
    assert replies == ["elm 0 answered", "oak 0 answered", "oak 2 answered"]


def test_weights_survive_a_replaced_system_prompt(tmp_path):
    rows = [talk("oak", 0, 1), talk("elm", 1)]
    rows[0]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    replies, _ = train(tmp_path, rows, train_on="every", system_prompt="")
    assert replies == ["elm 0 answered", "oak 1 answered"]
