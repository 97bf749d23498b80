"""Datasets of one log for bases that refuse different rows: cut to the rows that all of them have."""

import pytest
from data_rows import THINGS, FakeRendered, WordRenderer, chat, write_log

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.common_rows import cut_to_common
from graftwork.data.prepare import PrepareJob, prepare
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import list_files, read_manifest, read_rows
from graftwork.files.disk import file_digest
from graftwork.records.dataset import SPLITS

ASKS = ("What does the {} cost?", "Who made our {} in 1950?", "Where can one borrow any {} on Sundays?")


class WastefulRenderer(WordRenderer):
    """Needs eight tokens more for every question about one of the things."""

    def __init__(self, thing):
        self._thing = thing
        self.tokenizer_fingerprint = f"wasteful on {thing}"

    def render(self, messages, reply):
        rendered = super().render(messages, reply)
        more = 8 * (self._thing in messages[-1].content)
        return FakeRendered((1,) * more + rendered.tokens, rendered.trained_from + more)


@pytest.fixture
def prepared(tmp_path):
    write_log(
        tmp_path / "log.jsonl",
        [
            chat(ask.format(thing), f"Number {number} answer on the {thing}.", status="success")
            for number, ask in enumerate(ASKS)
            for thing in THINGS
        ],
    )
    (tmp_path / "work").mkdir()

    def run(renderer):
        settings = DataSettings(logs=("log.jsonl",), validation=0.2, test=0.3, max_tokens=16)
        job = PrepareJob(
            AuditContext(settings=settings),
            base=renderer.tokenizer_fingerprint,
            base_fingerprint="f",
            renderer=renderer,
            work=tmp_path / "work",
            out=tmp_path / "out",
            root=tmp_path,
        )
        return prepare(job, processes=1).datasets[0].folder

    return run


def contents(folder):
    return {
        split: [(row.id, row.messages, row.reply) for row in read_rows(folder, split)] for split in SPLITS
    }


def test_every_base_gets_the_rows_that_none_of_them_refuses_in_the_same_splits_and_order(prepared, tmp_path):
    folders = [prepared(WastefulRenderer(thing)) for thing in THINGS[:2]]
    before = [contents(folder) for folder in folders]
    assert before[0] != before[1]
    cut = [contents(folder) for _, folder in cut_to_common(folders, out=tmp_path / "out")]
    assert cut[0] == cut[1]
    assert cut[0] == {split: [row for row in before[0][split] if row in before[1][split]] for split in SPLITS}
    asked = [messages[-1].content for rows in cut[0].values() for _, messages, _ in rows]
    assert asked
    assert not [question for question in asked if THINGS[0] in question or THINGS[1] in question]


def test_a_cut_dataset_is_whole_and_named_by_its_content(prepared, tmp_path):
    folders = [prepared(WastefulRenderer(thing)) for thing in THINGS[:2]]
    for dataset, folder in cut_to_common(folders, out=tmp_path / "out"):
        assert read_manifest(folder) == dataset
        assert folder.name == dataset.content_hash
        assert all(file_digest(folder / shard.file) == shard.sha256 for shard in list_files(dataset))
        for split in SPLITS:
            rows, summary = read_rows(folder, split), dataset.splits[split]
            assert summary.rows == len(rows)
            assert summary.spread_lengths() == tuple(sorted(len(row.tokens) for row in rows))
            assert summary.trained_tokens == sum(len(row.tokens) - row.trained_from for row in rows)


def test_datasets_with_the_same_rows_stay_as_they_are(prepared, tmp_path):
    folders = [prepared(WastefulRenderer("nothing")), prepared(WastefulRenderer("no thing"))]
    assert [folder for _, folder in cut_to_common(folders, out=tmp_path / "out")] == folders
