"""Any row and any token leads back to its log line, and any log line to what became of it."""

import pytest
from dataset_samples import ByteDecoder, row, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.ingest.read import hash_line
from graftwork.data.inspect import check_line, trace
from graftwork.records.dataset import Drop
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.interaction import Origin

LINES = [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}', b'{"n": 4}', b'{"n": 5}']


@pytest.fixture
def project(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a b.jsonl").write_bytes(b"\r\n".join(LINES) + b"\n")
    return tmp_path


@pytest.fixture
def folder(project):
    name = "logs/a b.jsonl"
    rows = [row(f"question {n}", "aäb", line=n, file=name, raw=LINES[n - 1], id=f"id-{n}") for n in (1, 2, 3)]
    split_row = [
        row(f"question 3 turn {turn}", line=3, file=name, raw=LINES[2], id=f"id-3#{turn}") for turn in (1, 2)
    ]
    drops = [
        Drop(
            origin=Origin(file=name, line=4),
            step="duplicate",
            reason=f"the same as {name}:2",
            input_hash=hash_line(LINES[3]),
        ),
        Drop(origin=Origin(file=name, line=5), step="filter", reason="placeholder: a mock answer"),
    ]
    return write_dataset(project, train=[*rows[:2], *split_row], test=rows[2:], drops=drops)


def test_a_log_line_shows_its_row(project, folder):
    found = trace(folder, "logs/a b.jsonl:2", root=project)
    (one,) = found.rows
    assert (one.place.split, one.place.number, one.place.id) == ("train", 1, "id-2")
    assert one.log.state == "same"
    assert one.input_hash == hash_line(LINES[1])
    assert found.drops == ()


def test_a_line_that_gave_several_rows_shows_all(project, folder):
    found = trace(folder, "logs/a b.jsonl:3", root=project)
    assert {(row.place.split, row.place.id) for row in found.rows} == {
        ("train", "id-3#1"),
        ("train", "id-3#2"),
        ("test", "id-3"),
    }


def test_a_dropped_line_shows_the_step_the_reason_and_the_row_that_was_kept(project, folder):
    (traced,) = trace(folder, "logs/a b.jsonl:4", root=project).drops
    assert (traced.drop.step, traced.log.state) == ("duplicate", "same")
    (kept,) = traced.kept
    assert (kept.split, kept.number, kept.origin.line) == ("train", 1, 2)


def test_a_reason_that_names_no_row_has_none_kept(project, folder):
    (traced,) = trace(folder, "logs/a b.jsonl:5", root=project).drops
    assert traced.kept == ()
    assert traced.log.state == "not_checked"


@pytest.mark.parametrize("name", ["a b.jsonl", "./logs/a b.jsonl", "absolute"])
def test_a_file_is_known_by_any_of_its_names(project, folder, name):
    asked = str(project / "logs/a b.jsonl") if name == "absolute" else name
    assert trace(folder, f"{asked}:1", root=project).rows[0].place.id == "id-1"


def test_a_token_is_reported_with_its_text_and_whether_it_is_trained(project, folder):
    first = trace(folder, "train:0", root=project).rows[0]
    for place, text, trained in (
        (0, "<|user|>", False),
        (first.trained_from, "a", True),
        (first.trained_from + 1, "ä", True),
        (first.tokens - 1, "<|end|>", True),
    ):
        (one,) = trace(folder, f"train:0:{place}", root=project, decoder=ByteDecoder()).rows
        assert one.token is not None
        assert (one.token.text, one.token.trained) == (text, trained)
        assert str(one.place.origin) == "logs/a b.jsonl:1"


def test_a_row_is_found_by_its_id_and_by_the_beginning_of_it(project, folder):
    assert trace(folder, "id-3", root=project).rows[0].place.split == "test"
    assert trace(folder, "id-3#2", root=project).rows[0].place.number == 3
    assert trace(folder, "id-1", root=project).rows[0].place.number == 0


@pytest.mark.parametrize(
    "what",
    [
        "logs/a b.jsonl:99", "none.jsonl:1", "nothing", "train:99", "train:0:9999", "id-", "rl:0", ":",
        "train:",
    ],
)  # fmt: skip
def test_a_row_that_is_not_found_is_an_error_with_a_fix(project, folder, what):
    with pytest.raises(UserError) as caught:
        trace(folder, what, root=project)
    assert caught.value.fix


def test_a_log_that_changed_or_went_is_reported(project, folder):
    log = project / "logs" / "a b.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"n": 2', b'"n": 7'))
    assert trace(folder, "train:1", root=project).rows[0].log.words == "the log has changed"
    assert trace(folder, "train:0", root=project).rows[0].log.state == "same"
    log.write_bytes(LINES[0])
    assert trace(folder, "train:1", root=project).rows[0].log.state == "changed"
    log.unlink()
    assert trace(folder, "train:1", root=project).rows[0].log.state == "gone"


@pytest.mark.parametrize("name", ["log.jsonl.gz", "log.jsonl.zst", "log.csv", "log.parquet", "-"])
def test_a_log_without_lines_is_reported_as_not_checked(tmp_path, name):
    check = check_line(Origin(file=name, line=1), expected="0" * 32, root=tmp_path)
    assert check.state == "not_checked"
    assert "not checked" in check.words


def test_a_json_array_is_not_reported_to_have_changed(tmp_path):
    (tmp_path / "log.json").write_text('[\n{"n": 1},\n{"n": 2}]')
    assert (
        check_line(Origin(file="log.json", line=2), expected="0" * 32, root=tmp_path).state == "not_checked"
    )


def test_a_byte_order_mark_does_not_count_as_a_change(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES[0])
    assert (
        check_line(Origin(file="log.jsonl", line=1), expected=hash_line(LINES[0]), root=tmp_path).state
        == "same"
    )


def test_a_damaged_shard_is_not_traced(project, folder):
    shard = folder / "train-0.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(Corrupted):
        trace(folder, "train:0", root=project)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 7), min_size=2, max_size=2), shard_rows=st.integers(1, 4))
def test_every_place_leads_to_its_own_line(tmp_path_factory, sizes, shard_rows):
    root = tmp_path_factory.mktemp("dataset")
    rows = [row(f"question {n}", line=n) for n in range(1, sum(sizes) + 1)]
    parts = {"train": rows[: sizes[0]], "test": rows[sizes[0] :]}
    folder = write_dataset(root, shard_rows=shard_rows, **parts)
    for split, part in parts.items():
        for number, one in enumerate(part):
            (by_place,) = trace(folder, f"{split}:{number}", root=root).rows
            (by_line,) = trace(folder, str(one.origin), root=root).rows
            assert by_place == by_line
            assert by_place.place.origin == one.origin
