"""Two datasets differ in what is named, and in nothing else."""

from dataset_samples import row, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.inspect import diff_datasets
from graftwork.records.dataset import Drop, InputFile
from graftwork.records.interaction import Origin


def drop(line, step):
    return Drop(origin=Origin(file="log.jsonl", line=line), step=step, reason="because")


def test_a_dataset_does_not_differ_from_itself(tmp_path):
    folder = write_dataset(
        tmp_path, train=[row("one", line=1), row("two", line=2)], drops=[drop(3, "filter")]
    )
    diff = diff_datasets(folder, folder)
    assert diff.same
    assert (diff.made_for, diff.settings) == ((), ())
    assert (diff.rows.same, diff.rows.added, diff.rows.removed, diff.rows.moved, diff.rows.changed) == (
        2,
        0,
        0,
        0,
        0,
    )
    assert diff.rows.named == {}
    assert (diff.drops["filter"].appeared, diff.drops["filter"].vanished) == (0, 0)


def test_rows_added_removed_moved_and_rendered_otherwise_are_counted_and_named(tmp_path):
    rows = {n: row(f"question {n}", line=n) for n in range(1, 8)}
    otherwise = row("question 3", "another answer", line=3)
    before = write_dataset(tmp_path, train=[rows[1], rows[2], rows[3], rows[4]], test=[rows[5]])
    after = write_dataset(
        tmp_path, train=[rows[1], otherwise, rows[5]], test=[rows[4]], validation=[rows[6], rows[7]]
    )
    diff = diff_datasets(before, after)
    assert (diff.rows.same, diff.rows.added, diff.rows.removed, diff.rows.moved, diff.rows.changed) == (
        1,
        2,
        1,
        2,
        1,
    )
    named = {
        kind: [(row.id, row.before, row.after) for row in rows] for kind, rows in diff.rows.named.items()
    }
    assert named == {
        "moved": [("log.jsonl:5", "test", "train"), ("log.jsonl:4", "train", "test")],
        "changed": [("log.jsonl:3", "train", "train")],
        "added": [("log.jsonl:6", None, "validation"), ("log.jsonl:7", None, "validation")],
        "removed": [("log.jsonl:2", "train", None)],
    }
    assert (diff.splits["train"].before.rows, diff.splits["train"].after.rows) == (4, 3)
    assert diff.splits["test"].after.tokens == len(rows[4].tokens)


def test_twenty_rows_are_named_and_all_are_counted(tmp_path):
    rows = [row(f"question {n}", line=n) for n in range(30)]
    before, after = (
        write_dataset(tmp_path, train=rows, shard_rows=7),
        write_dataset(tmp_path, test=rows, shard_rows=9),
    )
    diff = diff_datasets(before, after)
    assert diff.rows.moved == 30
    assert [row.origin.line for row in diff.rows.named["moved"]] == list(range(20))


def test_an_id_that_is_used_twice_counts_twice(tmp_path):
    before = write_dataset(tmp_path, train=[row("one", id="x", line=1), row("two", id="x", line=2)])
    after = write_dataset(tmp_path, train=[row("one", id="x", line=1)])
    diff = diff_datasets(before, after)
    assert (diff.rows.same, diff.rows.removed) == (1, 1)


def test_settings_base_and_inputs_that_differ_are_named(tmp_path):
    files = {name: InputFile(file=name, sha256=name * 64, rows=1) for name in "abc"}
    before = write_dataset(
        tmp_path,
        train=[row("q")],
        settings={"seed": 0, "keep": {"role": ["x"], "stage": []}},
        inputs=(files["a"], files["b"]),
    )
    after = write_dataset(
        tmp_path,
        train=[row("q")],
        settings={"seed": 1, "keep": {"role": ["x"], "stage": [1]}, "new": True},
        inputs=(files["b"].model_copy(update={"sha256": "9" * 64}), files["c"]),
        base="other",
    )
    diff = diff_datasets(before, after)
    assert {change.key: (change.before, change.after) for change in diff.settings} == {
        "seed": (0, 1),
        "keep.stage": ([], [1]),
        "new": (None, True),
    }
    assert [change.key for change in diff.made_for] == ["base"]
    assert (diff.inputs.added, diff.inputs.removed, diff.inputs.changed) == (("c",), ("a",), ("b",))


def test_drops_that_appeared_and_vanished_are_counted_by_step(tmp_path):
    before = write_dataset(
        tmp_path, train=[row("q")], drops=[drop(2, "filter"), drop(3, "filter"), drop(4, "leak")]
    )
    after = write_dataset(
        tmp_path, train=[row("q")], drops=[drop(3, "filter"), drop(5, "filter"), drop(6, "duplicate")]
    )
    counts = {
        step: (one.before, one.after, one.appeared, one.vanished)
        for step, one in diff_datasets(before, after).drops.items()
    }
    assert counts == {"filter": (2, 2, 1, 1), "leak": (1, 0, 0, 1), "duplicate": (0, 1, 1, 0)}


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "train", "test"]), st.sampled_from([None, "train", "test"])),
        max_size=12,
    )
)
def test_counts_agree_with_a_plain_comparison(tmp_path_factory, sides):
    root = tmp_path_factory.mktemp("diff")
    folders = []
    for at in (0, 1):
        parts = {"train": [], "test": []}
        for line, side in enumerate(sides, start=1):
            if side[at] is not None:
                parts[side[at]].append(row(f"question {line}", line=line))
        folders.append(write_dataset(root / str(at), shard_rows=3, **parts))
    rows = diff_datasets(*folders).rows
    assert rows.added == sum(before is None and after is not None for before, after in sides)
    assert rows.removed == sum(before is not None and after is None for before, after in sides)
    assert rows.moved == sum(None not in (before, after) and before != after for before, after in sides)
    assert rows.same == sum(before is not None and before == after for before, after in sides)
