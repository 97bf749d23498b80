"""Replies that a log rates bad: dropped, or kept as bad replies and never as references."""

from data_rows import THINGS, chat, write_log
from test_data_prepare import ASKS, run

from graftwork.data.prepare import audit_files
from graftwork.files.dataset import iterate_drops, read_rows


def rated_rows(name, bad, good):
    """Every second row is bad."""
    questions = [ask.format(thing) for ask in ASKS for thing in THINGS]
    return [
        chat(asked, f"Reply {n} on that.", **{name: bad if n % 2 else good})
        for n, asked in enumerate(questions)
    ]


def rewards_of(folder, split):
    return {row.reward for row in read_rows(folder, split)}


def test_labelled_and_scored_bad_replies_are_a_blocker_and_dropped(tmp_path):
    for name, bad, good in (("label", False, True), ("reward", 0.0, 0.9), ("score", -1, 1)):
        folder = tmp_path / name
        folder.mkdir()
        rows = rated_rows(name, bad, good)
        audit = audit_files([str(write_log(folder / "log.jsonl", rows))])
        assert not audit.fit_to_train
        [found] = [item for item in audit.findings if item.code == "rated_bad"]
        assert found.count == len(rows) // 2
        _, dataset = run(folder, rows)
        assert all(
            reward > 0 for split in ("train", "validation", "test") for reward in rewards_of(dataset, split)
        )
        assert sum("rated_bad" in drop.reason for drop in iterate_drops(dataset)) == len(rows) // 2


def test_bad_replies_that_are_kept_are_trained_on_and_no_reference(tmp_path):
    _, dataset = run(tmp_path, rated_rows("label", False, True), drop_rated_bad=False)
    assert rewards_of(dataset, "train") == {0.0, 1.0}
    assert rewards_of(dataset, "test") == rewards_of(dataset, "validation") == {1.0}
