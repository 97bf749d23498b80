import csv
import gzip
import io
import json
import os
import stat
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_rows import chat, write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.files import cut_blocks, find_sources
from graftwork.data.ingest.read import read, read_block, read_file
from graftwork.data.settings import DataSettings, Mapping
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.interaction import Interaction

ROWS = [
    chat(f"Where is {thing}?", f'Here, {thing} é \\ " ]}}, \n right here.', id=thing) for thing in "abcdefgh"
]
LINES = [json.dumps(row).encode() for row in ROWS]


def write(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    return name


def blocks_of(tmp_path, data, *, name="log.jsonl", **limits):
    return list(cut_blocks(write(tmp_path, name, data), root=tmp_path, **limits))


def results_of(blocks):
    return [row.result for block in blocks for row in read_block(block, settings=DataSettings())]


def codes(results):
    return [(r.origin.line, r.code if isinstance(r, ReadFault) else "ok") for r in results]


def contents(results):
    return [(r.id, r.messages, r.reply) for r in results]


def as_csv(rows, *, delimiter=","):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["id", "messages"])
    writer.writerows([row["id"], json.dumps(row["messages"])] for row in rows)
    return out.getvalue().encode()


def as_parquet(rows):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


CONTAINERS = {
    "log.jsonl": b"\n".join(LINES) + b"\n",
    "log.ndjson": b"\r\n".join(LINES),
    "compact.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "log.csv": as_csv(ROWS),
    "excel.csv": b"\xef\xbb\xbf" + as_csv(ROWS, delimiter=";"),
    "log.tsv": as_csv(ROWS, delimiter="\t"),
    "wide.csv": ("\ufeff" + as_csv(ROWS).decode()).encode("utf-16-be"),
    "wide.json": json.dumps(ROWS, indent=2).encode("utf-16"),
    "log.parquet": as_parquet(ROWS),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_every_container_gives_the_same_rows(tmp_path, name, packing):
    data = CONTAINERS[name]
    if packing == ".gz":
        data = gzip.compress(data[:100]) + gzip.compress(data[100:])
    elif packing == ".zst":
        data = zstandard.compress(data[:100]) + zstandard.compress(data[100:])
    blocks = (
        blocks_of(tmp_path, data, name=name + packing, size=300)
        if "parquet" not in name or not packing
        else None
    )
    if blocks is None:
        with pytest.raises(UserError, match="Parquet"):
            blocks_of(tmp_path, data, name=name + packing)
        return
    expected = [
        Interaction.model_validate(r) for r in results_of(blocks_of(tmp_path, CONTAINERS["log.jsonl"]))
    ]
    assert contents(results_of(blocks)) == contents(expected)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert len(blocks) > 2


@pytest.mark.parametrize("name", ["pretty.json", "log.csv", "log.ndjson"])
def test_a_row_has_the_line_that_it_begins_on(tmp_path, name):
    lines = CONTAINERS[name].splitlines()
    for result in results_of(blocks_of(tmp_path, CONTAINERS[name], name=name, size=400)):
        line = lines[result.origin.line - 1]
        assert line.strip() == b"{" if name == "pretty.json" else result.id.encode() in line


def test_rows_of_parquet_are_counted_from_one(tmp_path):
    blocks = blocks_of(tmp_path, CONTAINERS["log.parquet"], name="log.parquet", size=500)
    assert [r.origin.line for r in results_of(blocks)] == list(range(1, len(ROWS) + 1))


def test_the_key_of_a_block_knows_neither_its_file_nor_its_place(tmp_path):
    one = blocks_of(tmp_path, b"\n".join(LINES), name="a.jsonl")
    other = blocks_of(tmp_path, b"\n".join(LINES), name="b.jsonl.gz")
    assert [b.key for b in one] == [b.key for b in other]
    first, second, *_ = blocks_of(tmp_path, (LINES[0] + b"\n") * 4, size=len(LINES[0]) + 1)
    assert first.key == second.key
    assert (first.first_line, second.first_line) == (1, 2)
    assert blocks_of(tmp_path, LINES[0] + b"\n\n" + LINES[1])[0].key != one[0].key


@given(
    st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=30),
    st.integers(0, 30),
    st.integers(1, 80),
)
@settings(max_examples=200)
def test_appended_rows_change_only_the_last_block(tmp_path_factory, lines, kept, size):
    folder = tmp_path_factory.mktemp("grow")
    # A first line that is no array, no table and not packed.
    whole = b"".join(line + b"\n" for line in [b"x", *lines])
    prefix = b"".join(line + b"\n" for line in [b"x", *lines][: kept + 1])
    after = blocks_of(folder, whole, size=size)
    before = blocks_of(folder, prefix, size=size)
    assert before[:-1] == after[: len(before) - 1]
    assert b"".join(block.data for block in after) == whole
    assert [b.first_line for b in after[1:]] == [b.first_line + b.data.count(b"\n") for b in after[:-1]]


@given(st.integers(1, 8), st.integers(50, 900))
@settings(max_examples=40)
def test_rows_appended_to_an_array_change_only_the_last_block(tmp_path_factory, kept, size):
    folder = tmp_path_factory.mktemp("grow")
    before = blocks_of(folder, json.dumps(ROWS[:kept], indent=1).encode(), name="log.json", size=size)
    after = blocks_of(folder, json.dumps(ROWS, indent=1).encode(), name="log.json", size=size)
    assert before[:-1] == after[: len(before) - 1]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), min_size=1, max_size=6),
    st.sampled_from([None, 1, "\t"]),
)
@settings(max_examples=80)
def test_elements_of_an_array_come_out_as_they_went_in(tmp_path_factory, rows, indent):
    folder = tmp_path_factory.mktemp("array")
    data = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    blocks = blocks_of(folder, data, name="log.json", size=40)
    assert [json.loads(line) for block in blocks for line in block.data.split(b"\n") if line] == rows


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_rows_before_a_truncated_end_survive_and_one_fault_names_the_line(tmp_path, pack):
    data = os.urandom(3000).hex().encode()
    rows = [json.dumps(chat("Where?", data[i * 100 : i * 100 + 100].decode())).encode() for i in range(40)]
    packed = pack(b"\n".join(rows[:30]) + b"\n") + pack(b"\n".join(rows[30:]))
    found = codes(results_of(blocks_of(tmp_path, packed[:-20], name="log.jsonl.gz")))
    good = [line for line, code in found if code == "ok"]
    assert good == list(range(1, len(good) + 1))
    assert len(good) >= 30
    assert found[-1] == (len(good) + 1, "parse_error")


def test_rows_before_a_damaged_place_in_gzip_survive(tmp_path):
    rows = [json.dumps(chat("Where?", os.urandom(500).hex())).encode() for _ in range(100)]
    packed = bytearray(gzip.compress(b"\n".join(rows)))
    packed[len(packed) // 2 :] = os.urandom(50)
    *good, last = results_of(blocks_of(tmp_path, bytes(packed), name="log.jsonl.gz"))
    assert len([r for r in good if isinstance(r, Interaction)]) >= 45
    assert isinstance(last, ReadFault)


@pytest.mark.parametrize("name", ["log.json.gz", "log.csv.gz"])
def test_a_truncated_array_or_table_keeps_its_rows(tmp_path, name):
    rows = [chat("Where?", os.urandom(200).hex(), id=str(i)) for i in range(50)]
    data = json.dumps(rows, indent=1).encode() if "json" in name else as_csv(rows)
    *good, last = results_of(blocks_of(tmp_path, gzip.compress(data)[:-3000], name=name))
    assert len(good) > 20
    assert all(isinstance(r, Interaction) for r in good)
    assert "ends too early" in last.message
    assert last.origin.line > good[-1].origin.line


def test_a_truncated_array_with_a_broken_element_names_both(tmp_path):
    rows = [json.dumps(chat("Where?", os.urandom(200).hex())).encode() for _ in range(50)]
    data = b"[\n" + b",\n".join([rows[0], b'{"broken', *rows]) + b"\n]"
    results = results_of(blocks_of(tmp_path, gzip.compress(data)[:-3000], name="log.json.gz"))
    assert codes(results)[:3] == [(2, "ok"), (3, "parse_error"), (4, "ok")]
    assert "ends too early" in results[-1].message
    assert len([r for r in results if isinstance(r, ReadFault)]) == 2


def test_a_line_beyond_the_limit_is_measured_and_skipped(tmp_path):
    long = json.dumps(chat("Where?", "x" * 5000)).encode()
    data = b"\n".join([LINES[0], LINES[1], long, LINES[2], long])
    results = results_of(blocks_of(tmp_path, data, size=400, longest=1000))
    assert codes(results) == [(1, "ok"), (2, "ok"), (3, "parse_error"), (4, "ok"), (5, "parse_error")]
    assert str(len(long)) in results[2].message


def test_a_row_beyond_the_limit_in_other_containers_is_a_fault(tmp_path):
    rows = [ROWS[0], chat("Where?", "x" * 5000, id="long"), ROWS[1]]
    for name, data in {
        "log.csv": as_csv(rows),
        "log.parquet": as_parquet(rows),
        "log.json": json.dumps(rows, indent=1).encode(),
        "lines.json": b"[\n" + b",\n".join(json.dumps(row).encode() for row in rows) + b"\n]",
    }.items():
        found = results_of(blocks_of(tmp_path, data, name=name, longest=1000))
        assert [r.id for r in found if isinstance(r, Interaction)] == ["a", "b"], name
        assert any(isinstance(r, ReadFault) for r in found)


def test_a_huge_line_is_never_held(tmp_path):
    import tracemalloc

    with (tmp_path / "log.jsonl").open("wb") as out:
        out.write(b'{"prompt": "')
        for _ in range(100):
            out.write(b"x" * (1 << 20))
        out.write(b'"}\n' + LINES[0])
    tracemalloc.start()
    results = results_of(cut_blocks("log.jsonl", root=tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes(results) == [(1, "parse_error"), (2, "ok")]
    assert "100 MiB" in results[0].message
    assert peak < 80 << 20


def test_a_file_that_grows_is_read_as_it_was(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes((LINES[0] + b"\n") * 40)
    blocks = cut_blocks("log.jsonl", root=tmp_path, size=500)
    found = [next(blocks)]
    with path.open("ab") as out:
        out.write((LINES[1] + b"\n") * 40)
    assert len(results_of([*found, *blocks])) == 40


def test_a_last_line_without_its_end_is_taken_or_said_to_be_in_work(tmp_path):
    assert codes(results_of(blocks_of(tmp_path, LINES[0] + b"\n" + LINES[1]))) == [(1, "ok"), (2, "ok")]
    *_, fault = results_of(blocks_of(tmp_path, LINES[0] + b"\n" + LINES[1][:-5]))
    assert "still be being written" in fault.message
    *_, fault = results_of(blocks_of(tmp_path, b"[" + LINES[0] + b",", name="log.json"))
    assert "still be being written" in fault.message


def test_a_broken_element_of_a_pretty_array_loses_only_itself(tmp_path):
    data = json.dumps(ROWS, indent=2).encode().replace(b'"id": "c"', b'"id": "c', 1)
    results = results_of(blocks_of(tmp_path, data, name="log.json"))
    assert [r.id if isinstance(r, Interaction) else r.code for r in results] == [
        *("a", "b", "parse_error"),
        *("d", "e", "f", "g", "h"),
    ]


def test_objects_spread_over_lines_are_read_as_rows(tmp_path):
    data = b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS[:3])
    results = results_of(blocks_of(tmp_path, data, name="log.json", size=300))
    assert [r.id for r in results] == ["a", "b", "c"]
    [only] = results_of(blocks_of(tmp_path, json.dumps(ROWS[0], indent=2).encode(), name="log.json"))
    assert str(only.origin) == "log.json:1"
    assert codes(results_of(blocks_of(tmp_path, b"{\n" + LINES[0] + b"\n" + LINES[1]))) == [
        *((1, "parse_error"), (2, "ok"), (3, "ok"))
    ]


def test_a_line_end_inside_a_string_of_an_array_stays_wrong(tmp_path):
    data = b'[{"prompt": "a\nb", "completion": "c"},\n{"prompt": "a", "completion": "c"}]'
    assert [code for _, code in codes(results_of(blocks_of(tmp_path, data)))] == ["parse_error", "ok"]


def test_many_broken_places_cost_no_more_than_the_file(tmp_path):
    data = b"[\n" + b'{"a": [\n' * 3000 + LINES[0] + b"\n]"
    results = results_of(blocks_of(tmp_path, data, longest=2000))
    assert isinstance(results[-1], Interaction)


@pytest.mark.parametrize(
    ("header", "named"),
    [("prompt,prompt", "column 2"), ("prompt,", "column 2"), ('{"a": 1},x', "not a header")],
)
def test_a_bad_header_is_one_fault(tmp_path, header, named):
    [fault] = results_of(blocks_of(tmp_path, f"{header}\n1,2\n3,4\n".encode(), name="log.csv"))
    assert (fault.code, fault.origin.line) == ("schema", 1)
    assert named in fault.message


def test_bad_rows_of_a_table_are_named_and_the_others_survive(tmp_path):
    data = b'prompt,completion\na,b\nc\n\xff,d\n"e\n",f\n"open,g\nh,i\nj,k\n'
    found = codes(results_of(blocks_of(tmp_path, data, name="log.csv")))
    assert found == [
        *((2, "ok"), (3, "schema"), (4, "encoding"), (5, "ok")),
        *((7, "parse_error"), (8, "ok"), (9, "ok")),
    ]


def test_a_reply_in_a_table_stays_the_text_that_it_is(tmp_path):
    data = b'prompt,completion,max_tokens,duration_ms\nq,"{""a"":   [1]}",400,12.5\n'
    (tmp_path / "log.csv").write_bytes(data)
    [found] = read(["log.csv"], root=tmp_path)
    assert found.reply == '{"a":   [1]}'


def test_an_empty_cell_for_a_mapped_reply_is_a_failed_call(tmp_path):
    (tmp_path / "log.csv").write_text("asked,said,code\nq,a,200\nr,,500\n")
    settings = DataSettings(mapping=Mapping(question="asked", reply="said", status="code"))
    found = list(read(["log.csv"], root=tmp_path, settings=settings))
    assert [(row.reply, row.status) for row in found] == [("a", "success"), ("", "failed")]


def test_damaged_parquet_is_a_fault(tmp_path):
    data = bytearray(as_parquet([chat("q" * 50, os.urandom(50).hex()) for _ in range(2000)]))
    data[2000:4000] = bytes(2000)
    results = results_of(blocks_of(tmp_path, bytes(data), name="log.parquet"))
    assert isinstance(results[-1], ReadFault)
    [fault] = results_of(blocks_of(tmp_path, b"PAR1 and nothing else", name="log.parquet"))
    assert fault.code == "parse_error"


def test_values_that_json_does_not_know_are_read_from_parquet(tmp_path):
    import datetime
    import decimal

    rows = [
        {
            "prompt": "q",
            "completion": b"bytes",
            "at": datetime.datetime(2025, 1, 1),
            "cost": decimal.Decimal("1.5"),
        }
    ]
    [found] = results_of(blocks_of(tmp_path, as_parquet(rows), name="log.parquet"))
    assert (found.reply, found.extra["cost"]) == ("bytes", "1.5")
    [fault] = results_of(blocks_of(tmp_path, as_parquet([{"prompt": "q", "x": b"\xff"}]), name="log.parquet"))
    assert fault.code == "schema"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_standard_input_is_read_whatever_it_is(tmp_path, monkeypatch, pack):
    for name in ("log.jsonl", "pretty.json", "log.csv", "excel.csv", "log.tsv"):
        data = CONTAINERS[name]
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(pack(data))))
        found = list(read(["-"], root=tmp_path))
        assert [row.id for row in found] == [row["id"] for row in ROWS]
        assert found[0].origin.file == "stdin"


def test_parquet_on_standard_input_and_an_empty_one_are_refused(tmp_path, monkeypatch):
    for data, named in ((CONTAINERS["log.parquet"], "Parquet"), (b"", "empty")):
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(UserError, match=named):
            list(read(["-"], root=tmp_path))


def test_files_of_a_folder_that_are_not_read_are_named_once(tmp_path, caplog):
    (tmp_path / "logs").mkdir()
    write_log(tmp_path / "logs" / "log.jsonl", [chat("a question?", "an answer.")])
    (tmp_path / "logs" / "log.jsonl.1").touch()
    (tmp_path / "logs" / ".hidden").touch()
    for _ in range(2):
        assert find_sources(["logs"], root=tmp_path) == ("logs/log.jsonl",)
    [message] = caplog.messages
    assert "not read, by their names: log.jsonl.1; logs end in .jsonl" in message


def test_folders_are_walked_in_order_without_hidden_files_and_links(tmp_path):
    for name in (
        "b/z.jsonl",
        "b/a.csv.gz",
        "b/c/x.parquet",
        "b/notes.txt",
        "b/.hidden.jsonl",
        "b/.git/x.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "loop").symlink_to(tmp_path / "b")
    assert find_sources(["b"], root=tmp_path) == ("b/a.csv.gz", "b/c/x.parquet", "b/z.jsonl")
    assert find_sources(["b/", "b/z.jsonl", "-"], root=tmp_path) == (
        "b/a.csv.gz",
        "b/c/x.parquet",
        "b/z.jsonl",
        "-",
    )
    assert find_sources([str(tmp_path / "b" / "c")], root=tmp_path) == (str(tmp_path / "b/c/x.parquet"),)
    assert find_sources(["**/*.jsonl"], root=tmp_path) == ("b/z.jsonl",)
    assert find_sources(["b/**"], root=tmp_path) == (
        "b/a.csv.gz",
        "b/c/x.parquet",
        "b/notes.txt",
        "b/z.jsonl",
    )


def test_a_pattern_without_files_is_reported_by_name(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "empty").mkdir()
    for path, named in (
        *(("loop.jsonl", "points to itself"), ("nowhere.jsonl", "no such file")),
        *(("*.csv", "no file matches"), ("empty", "no log"), ("a\0b", "not a path")),
    ):
        with pytest.raises(UserError, match=named):
            find_sources([path], root=tmp_path)
    (tmp_path / "empty" / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(UserError, match="no log"):
        find_sources(["empty"], root=tmp_path)
    with pytest.raises(UserError, match="no log file"):
        find_sources([], root=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(EnvironmentFailure, match="permission"):
        find_sources(["closed"], root=tmp_path)


def test_links_that_lead_nowhere_are_passed_over_and_named(tmp_path, caplog):
    (tmp_path / "b").mkdir()
    write_log(tmp_path / "b" / "a.jsonl", ROWS)
    for name in ("gone.jsonl", "gone.txt"):
        (tmp_path / "b" / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "b" / "loop.jsonl").symlink_to(tmp_path / "b" / "loop.jsonl")
    (tmp_path / "b" / "good.jsonl").symlink_to(tmp_path / "b" / "a.jsonl")
    assert find_sources(["b"], root=tmp_path) == ("b/a.jsonl", "b/good.jsonl")
    assert (
        sorted("gone.jsonl" in message or "loop.jsonl" in message for message in caplog.messages)
        == [True] * 2
    )
    assert find_sources(["b/*.jsonl"], root=tmp_path) == ("b/a.jsonl", "b/good.jsonl")
    with pytest.raises(UserError, match="no such file"):
        find_sources(["b/gone.jsonl"], root=tmp_path)


def test_pipes_and_sockets_are_passed_over_and_refused_by_name(tmp_path):
    (tmp_path / "b").mkdir()
    write_log(tmp_path / "b" / "a.jsonl", ROWS)
    os.mkfifo(tmp_path / "b" / "pipe.jsonl")
    os.mknod(tmp_path / "b" / "socket.jsonl", stat.S_IFSOCK | 0o600)
    assert find_sources(["b"], root=tmp_path) == ("b/a.jsonl",)
    assert find_sources(["b/*.jsonl"], root=tmp_path) == ("b/a.jsonl",)
    for path in ("b/pipe.jsonl", "b/socket.jsonl", "/dev/null"):
        with pytest.raises(UserError, match="not a file"):
            find_sources([path], root=tmp_path)


def test_a_log_may_be_a_pipe(tmp_path):
    source, sink = os.pipe()
    try:
        assert find_sources([f"/dev/fd/{source}"], root=tmp_path) == (f"/dev/fd/{source}",)
    finally:
        os.close(source)
        os.close(sink)


def test_a_pipe_is_read_to_its_end(tmp_path):
    source, sink = os.pipe()
    os.write(sink, LINES[0])
    os.close(sink)
    try:
        assert len(list(read_file(f"/dev/fd/{source}"))) == 1
    finally:
        os.close(source)


def test_a_written_log_is_one_block(tmp_path):
    write_log(tmp_path / "log.jsonl", ROWS)
    [block] = cut_blocks("log.jsonl", root=tmp_path)
    rows = list(read_block(block, settings=DataSettings()))
    assert [row.line for row in rows] == list(range(1, len(ROWS) + 1))
    assert all(len(row.input_hash) == 32 for row in rows)
