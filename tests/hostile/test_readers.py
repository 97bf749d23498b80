"""Hostile files against everything that reads one: bombs, nesting, huge lines, damage.

Each promise is the same: the reader ends, with an error or fault of ours that names the place, and its memory
stays bounded. Memory is measured in a child process.
"""

import io
import subprocess
import sys
import textwrap

import pytest
from measured import each, measure

from graftwork.data.ingest import parquet_child as child
from graftwork.data.ingest.blocks import MOST_LINES, Entry, ReadFault
from graftwork.data.ingest.files import _read_frames, cut_blocks
from graftwork.data.ingest.read import read_file
from graftwork.files.config_text import MOST_LEVELS, parse_json, parse_yaml
from graftwork.plan.lint.configuration import read_written
from graftwork.project.load import load_settings
from graftwork.records.errors import GraftError, UserError


def laughs(levels: int, *, each: int = 10) -> str:
    """A list of ten lists of ten lists: a kilobyte that stands for `each ** levels` values."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * each)}]")
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    lines = ["a0: &a0 {k: v}"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}")
    return "\n".join(lines) + "\n"


HOSTILE_YAML = {
    "aliases of aliases": laughs(9),
    "merges of merges": merges(9),
    "a list within itself": "train: &a [*a]\n",
    "a mapping within itself": "train: &a {b: *a}\n",
    "a key within itself": "? &a [*a]\n: b\n",
    "a merge of itself": "train: &a {<<: *a}\n",
    "deep flow": "train: " + "[" * 5_000,
    "deep flow that is closed": "train: " + "[" * 300 + "]" * 300 + "\n",
    "deep blocks": "".join(" " * n + "a:\n" for n in range(300)),
    "a huge number": "train: " + "1" * 5000 + "\n",
    "a date that is none": "train: 2025-13-40\n",
    "a character that is none": 'train: "\\UFFFFFFFF"\n',
    "a wrong integer": "train: !!int x\n",
    "an empty integer": "train: !!int ''\n",
    "a wrong truth": "train: !!bool x\n",
    "a wrong time": "train: !!timestamp x\n",
    "a version that is none": "%YAML 1." + "9" * 5000 + "\n--- a\n",
    "an object of Python": "train: !!python/object/apply:os.system [id]\n",
    "an unhashable key": "{a: b}: c\n",
    "an unknown alias": "a: *b\n",
    "NUL": "train: a\0b\n",
    "a mebibyte too much": "# " + "x" * (1 << 20) + "\n",
    "two documents": "a: 1\n---\nb: 2\n",
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_is_a_clear_mistake_with_its_place(name, tmp_path):
    path = tmp_path / "graft.yaml"
    path.write_text(HOSTILE_YAML[name])
    with pytest.raises(UserError) as refused:
        load_settings(path)
    assert str(path) in refused.value.where
    assert refused.value.fix
    assert len(refused.value.what) < 400


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_does_not_break_the_linter(name):
    if name == "a mebibyte too much":
        pytest.skip("the size of a file is checked where it is opened")
    with pytest.raises(UserError) as refused:
        read_written(HOSTILE_YAML[name], file="axolotl.yaml")
    assert "axolotl.yaml" in refused.value.where


def test_a_yaml_bomb_takes_no_memory(tmp_path):
    path = tmp_path / "graft.yaml"
    path.write_text(laughs(9))
    assert path.stat().st_size < 1000
    measured = measure(
        f"""
        for read in (load_settings, lambda path: read_written(path.read_text(), file="axolotl.yaml")):
            try:
                read(Path({str(path)!r}))
            except UserError as refused:
                print(refused.what)
        """,
        prepare="""
        from pathlib import Path
        from graftwork.plan.lint.configuration import read_written
        from graftwork.project.load import load_settings
        from graftwork.records.errors import UserError
        """,
    )
    assert measured.output == "this expands to more than 100,000 values\n" * 2
    assert measured.grown < 16, measured


def test_plain_aliases_and_merges_still_read():
    text = """
        base: &base {rank: 16, tags: &tags [a, b]}
        more: {<<: *base, tags: *tags, alpha: 32}
    """
    content = parse_yaml(textwrap.dedent(text), where="x.yaml").content
    assert content["more"] == {"rank": 16, "tags": ["a", "b"], "alpha": 32}
    deep = "a: " + "[" * (MOST_LEVELS - 2) + "]" * (MOST_LEVELS - 2)
    assert parse_yaml(deep, where="x.yaml").content


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "1" * 5000 + "}", '{"a": "\\ud800', "{"],
    ids=["lists", "objects", "a huge number", "half a character", "an open brace"],
)
def test_hostile_json_settings_are_a_clear_mistake(text):
    for read in (lambda: parse_json(text, where="x.json"), lambda: read_written(text, file="x.json")):
        with pytest.raises(GraftError) as refused:
            read()
        assert "x.json" in refused.value.where


MAKE = """
import gzip, json, os, zstandard
from pathlib import Path
M = 1 << 20
def write(name, data):
    Path(name).write_bytes(data)
"""
READ = """
import os, resource
from pathlib import Path
from graftwork.data.ingest.read import read_file
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.files import split_parquet
M = 1 << 20
def show(results):
    found = [f"{r.origin.line} {getattr(r, 'message', 'read')}" for r in results]
    print(len(found), *found[-2:], sep="|")
def show_blocks(name):
    rows, faults = 0, []
    for block in cut_blocks(name, root=Path()):
        rows += block.data.count(b"\\n")
        faults += [fault.message for fault in block.faults][:9]
    print(rows, *faults[:2], sep="|")
def children():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
"""


def read_hostile(tmp_path, *prepare: str, attack: str, warm: str = "", **more):
    """`prepare` makes files in a process of its own: the measured one would keep what that took.

    `warm` runs in the measured process before it is measured.
    """
    if prepare:
        make = "\n".join((MAKE, *map(textwrap.dedent, prepare)))
        subprocess.run([sys.executable, "-c", make], check=True, cwd=tmp_path)
    begin = f"{READ}os.chdir({str(tmp_path)!r})\n"
    return measure(attack, prepare=begin + textwrap.dedent(warm), **more)


JSON_LINES = {
    # name: what the line is made of, what is said of it, what reading it may take in MiB
    "empty objects": ("b'{\"a\":[' + b'{},' * (3 * M) + b'{}]}'", "1,048,576 values or more", 80),
    "objects": ("b'{\"a\":[' + b'{\"a\":1},' * (2 * M) + b'{}]}'", "1,048,576 values or more", 80),
    "numbers": ("b'{\"a\":[' + b'1,' * (9 * M) + b'1]}'", "1,048,576 values or more", 80),
    "keys": (
        "b'{' + b','.join(b'\"%x\":1' % n for n in range(3 * M // 2)) + b'}'",
        "1,048,576 values or more",
        160,
    ),
    "no numbers": ("b'{\"a\":[' + b'NaN,' * (3 * M) + b'NaN]}'", "1,048,576 values or more", 80),
    "an object in text": (
        "json.dumps({'prompt': 'q', 'completion': '[' + '{},' * (3 * M) + '{}]'}).encode()",
        "read",
        400,
    ),
    "plain text": ('b\'{"prompt":"\' + b\'a\' * (30 * M) + b\'","completion":"b"}\'', "read", 300),
    "commas in text": ('b\'{"prompt":"\' + b\'a,\' * (15 * M) + b\'","completion":"b"}\'', "read", 300),
    "deep lists": ("b'{\"a\":' + b'[' * M", "1,048,576 values or more", 80),
    "deep and not a number": ("b'{\"a\":' * (M // 2) + b'NaN' + b'}' * (M // 2)", "depth limit exceeded", 80),
    "a number of a million digits": ("b'{\"a\":' + b'1' * M + b'}'", "infinity", 160),
    "repeated keys and huge numbers": (
        "b'{\"a\":1,\"b\":' + b'1' * 300 + b',\"a\":' + b'2' * 5000 + b'}'",
        "",
        160,
    ),
    "NUL": ("b'\\0' * (30 * M)", "NUL bytes", 200),
    "over the limit": ("b'x' * (40 * M)", "one row may have 32 MiB", 160),
}


@each(JSON_LINES, quick=("empty objects", "an object in text", "deep lists", "NUL"))
def test_a_huge_line_of_json_is_read_or_named_in_bounded_memory(name, tmp_path):
    data, shown, most = JSON_LINES[name]
    measured = read_hostile(
        tmp_path,
        f'write(\'log.jsonl\', {data} + b\'\\n{{"prompt":"q","completion":"good"}}\\n\')',
        attack="show(read_file('log.jsonl'))",
    )
    assert measured.code == 0, measured.errors
    count, first, last = measured.output.strip().split("|")
    assert (count, last) == ("2", "2 read")
    assert shown in first
    assert measured.grown < most, measured


def test_json_arrays_nested_without_end_are_given_up_early(tmp_path):
    good = '{"prompt":"q","completion":"good"}'
    nested = {"deep.json": '{"a":' + "[" * (4 << 20), "wide.json": '{"a":[' + "[]," * (2 << 20) + "[]]},"}
    for name, bad in nested.items():
        (tmp_path / name).write_text(f"[\n{good},\n{bad}\n{good}\n]")
    attack = "for name in ('deep.json', 'wide.json'): show(read_file(name))"
    measured = read_hostile(tmp_path, attack=attack)
    assert measured.code == 0, measured.errors
    assert [line.rpartition("|")[2] for line in measured.output.split("\n")[:2]] == ["4 read", "4 read"]
    assert measured.grown < 100, measured


CSV = {
    "an open quote before short rows": ("b'prompt,completion\\n\"a,b\\n' + b'a,b\\n' * (M // 4)", 64),
    "an open quote in every row": ("b'prompt,completion\\n' + b'\"a,b\\n\\n' * (M // 20) + b'\"'", 64),
    "rows that are too short": ("b'prompt,completion\\n' + b'a\\n' * (M // 16)", 64),
    "an empty line a thousand times in a cell": ("b'prompt,completion\\n\"' + b'\\n' * M + b'\",b\\n'", 64),
    "ten million columns": ("b'prompt' + b',aa' * (10 * M) + b'\\n'", 200),
    "ten million cells": ("b'prompt,completion\\n' + b',aa' * (10 * M) + b'\\n'", 200),
    "cells over many lines": (
        "b'prompt,completion\\n' + (b'aa,' * (M // 2) + b'\"\\n\",') * 6 + b'\\n'",
        160,
    ),
    "one cell of 30 MiB": ("b'prompt,completion\\n' + b'a' * (30 * M) + b',b\\n'", 400),
}


@each(CSV, quick=("an open quote before short rows", "ten million cells"))
def test_hostile_csv_is_read_in_bounded_memory(name, tmp_path):
    data, most = CSV[name]
    measured = read_hostile(tmp_path, f"write('log.csv', {data})", attack="show_blocks('log.csv')")
    assert measured.code == 0, measured.errors
    assert measured.grown < most, measured


@pytest.mark.slow
def test_an_open_quote_in_ten_megabytes_of_csv_takes_no_memory(tmp_path):
    data = "b'prompt,completion\\n\"a,b\\n' + b'a,b\\n' * (10 * M // 4)"
    attack = "print(sum(1 for _ in read_file('log.csv')))"
    measured = read_hostile(tmp_path, f"write('log.csv', {data})", attack=attack, timeout=3000)
    assert measured.output == "2621441\n", measured
    assert measured.grown < 100, measured


def test_the_rows_behind_an_open_quote_are_read_at_their_lines(tmp_path):
    rows = [f"question {n},answer {n}" for n in range(1000)]
    rows[10] = 'question "10,"answer 10'
    (tmp_path / "log.csv").write_text("\n".join(["prompt,completion", *rows]) + "\n")
    read = {result.origin.line: result for result in read_file("log.csv", root=tmp_path)}
    assert sorted(read) == list(range(2, 1002))
    assert isinstance(read[12], ReadFault)
    assert read[13].reply == "answer 11"
    assert read[1001].reply == "answer 999"


def test_the_names_of_a_csv_header_are_compared_in_one_pass(tmp_path):
    """With every pair of names compared, this header takes longer than a test may."""
    names = ["prompt", *(f"c{n}" for n in range(500_000)), "prompt"]
    (tmp_path / "log.csv").write_text(",".join(names) + "\n")
    (fault,) = read_file("log.csv", root=tmp_path)
    assert "column 500002" in fault.message


PACKED = {
    "gzip, one line": "gzip.compress(b'a' * (200 * M))",
    "zstd, one line": "zstandard.compress(b'a' * (800 * M))",
    "zstd, many lines": "zstandard.compress(b'\\n' * (800 * M))",
    "gzip of gzip": "gzip.compress(gzip.compress(b'a' * (100 * M)))",
    "many empty members": "gzip.compress(b'') * (M // 20)",
    "zstd with a window of a gigabyte": (
        "zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=30))"
        ".compressobj().compress(b'a' * M)"
    ),
}


@each(PACKED, quick=("zstd, one line", "gzip of gzip"))
def test_packed_bombs_end_in_a_fault_and_take_no_memory(name, tmp_path):
    measured = read_hostile(
        tmp_path,
        f"write('log.jsonl', {PACKED[name]})",
        attack="""
        from graftwork.records.errors import UserError
        try:
            show_blocks("log.jsonl")
        except UserError as mistake:
            print(mistake.what)
        """,
    )
    assert measured.code == 0, measured.errors
    assert measured.grown < 220, measured
    if name.startswith("zstd, "):
        assert "unpacks to more than 1,000 times its size" in measured.output


@each(("log.jsonl", "log.csv", "log.json"), quick=("log.jsonl", "log.json"))
def test_a_block_of_the_shortest_rows_or_of_faults_stays_small(name, tmp_path):
    """Each row or fault takes some hundred bytes or more in memory, however short its line is."""
    begin, row, end = {
        "log.jsonl": ("", "x\n", ""),
        "log.csv": ("prompt,completion\n", "x\n", ""),
        "log.json": ("[\n", "{},\n", "{}]"),
    }[name]
    (tmp_path / name).write_text(begin + row * 140_000 + end)
    blocks = list(cut_blocks(name, root=tmp_path))
    assert all(block.data.count(b"\n") <= MOST_LINES for block in blocks)
    assert all(len(block.faults) <= MOST_LINES // 8 for block in blocks)
    assert sum(block.data.count(b"\n") + len(block.faults) for block in blocks) >= 140_000


@pytest.mark.slow
def test_a_log_of_nothing_but_bad_lines_does_not_pile_up(tmp_path):
    measured = read_hostile(
        tmp_path,
        "write('log.jsonl', b'x\\n' * 1_000_000)",
        'write(\'small.jsonl\', b\'{"prompt":"q","completion":"a"}\\n\')',
        warm="from graftwork.data.prepare import audit_files\naudit_files(('small.jsonl',))",
        attack="print(audit_files(('log.jsonl',)).rows)",
        timeout=3000,
    )
    assert measured.output == "1000000\n", measured
    assert measured.grown < 120, measured


def test_mixed_encodings_lose_only_the_rows_that_cannot_be_read(tmp_path):
    row = '{"prompt":"é","completion":"ü"}\n'
    (tmp_path / "log.jsonl").write_bytes(
        row.encode() + row.encode("latin1") + row.encode("utf-16") + b"\n" + b"\0\n" + row.encode()
    )
    results = list(read_file("log.jsonl", root=tmp_path))
    assert [isinstance(result, ReadFault) for result in results] == [False, True, True, True, True, False]
    assert {result.code for result in results if isinstance(result, ReadFault)} == {"encoding"}


PARQUET = """
import pyarrow as pa, pyarrow.parquet as pq
def write_parquet(table, **how):
    pq.write_table(table, "log.parquet", compression="zstd", store_schema=False, **how)
    assert Path("log.parquet").stat().st_size < 200_000
def one_list(values):
    return pa.table({"prompt": pa.ListArray.from_arrays([0, len(values)], values)})
"""
LITTLE_MEMORY = "import graftwork.data.ingest.files as p\np._LEAST_MEMORY, p._MEMORY_PER_BYTE = 128 * M, 0"
PARQUET_BOMBS = {
    "one text a thousand times": (
        "write_parquet(pa.table({'prompt': pa.DictionaryArray.from_arrays("
        "pa.array([0] * 3000, pa.int32()), pa.array(['x' * M]))}))",
        "unpacks to more than 1,000 times its size",
    ),
    "one text of 150 MiB": (
        "write_parquet(pa.table({'prompt': ['x' * (150 * M)]}), use_dictionary=False)",
        "takes more than 128 MiB",
    ),
    "a list of 20 million truths": (
        "write_parquet(one_list(pa.nulls(20 * M, pa.bool_()).fill_null(True)))",
        "takes more than 128 MiB",
    ),
    "a list of 20 million nothings": (
        "write_parquet(one_list(pa.nulls(20 * M, pa.int8())))",
        "takes more than 128 MiB",
    ),
    "rows that are nothing": (
        "write_parquet(pa.table({'prompt': pa.nulls(20 * M, pa.int8())}))",
        "claims 20,971,520 rows",
    ),
}


@each(
    PARQUET_BOMBS,
    quick=("one text a thousand times", "a list of 20 million nothings", "rows that are nothing"),
)
def test_a_parquet_bomb_ends_in_a_fault_and_takes_bounded_memory(name, tmp_path):
    prepare, shown = PARQUET_BOMBS[name]
    attack = "show_blocks('log.parquet')\nprint(children())"
    measured = read_hostile(tmp_path, PARQUET, prepare, warm=LITTLE_MEMORY, attack=attack)
    assert measured.code == 0, measured.errors
    seen, of_child = measured.output.strip().split("\n")
    assert shown in seen
    assert measured.grown < 64, measured
    assert int(of_child) < 128 + 120, "the process that decodes"


@pytest.mark.slow
def test_a_parquet_bomb_takes_no_more_than_the_limit_of_a_small_file(tmp_path):
    prepare = "write_parquet(one_list(pa.nulls(150 * M, pa.int8())))"
    attack = "show_blocks('log.parquet')\nprint(children())"
    measured = read_hostile(tmp_path, PARQUET, prepare, attack=attack)
    seen, of_child = measured.output.strip().split("\n")
    assert "takes more than 512 MiB" in seen
    assert measured.grown < 64, measured
    assert int(of_child) < 512 + 120, "the process that decodes"


def test_the_rows_before_a_row_that_is_too_large_are_read(tmp_path):
    prepare = """
        texts = ["q"] * 600 + ["x" * (150 * M)] + ["q"] * 10
        table = pa.table({"prompt": texts, "completion": ["a"] * 611})
        write_parquet(table, use_dictionary=False, data_page_size=1, write_batch_size=1)
    """
    attack = "show_blocks('log.parquet')"
    measured = read_hostile(tmp_path, PARQUET, prepare, warm=LITTLE_MEMORY, attack=attack)
    assert measured.output.startswith("600|decoding the file from here on takes more than"), measured


def test_long_rows_that_fit_one_by_one_are_all_read(tmp_path):
    """All rows at once do not fit into the memory that decoding may take; one does."""
    prepare = """
        import random
        texts = [random.Random(n).randbytes(10_000).hex() * 150 for n in range(60)]
        table = pa.table({"prompt": texts, "completion": ["a"] * 60})
        pq.write_table(table, "log.parquet", use_dictionary=False, data_page_size=1, write_batch_size=1)
    """
    attack = "show_blocks('log.parquet')"
    measured = read_hostile(tmp_path, PARQUET, prepare, warm=LITTLE_MEMORY, attack=attack)
    assert measured.output == "60\n", measured.output[:300]


@pytest.mark.parametrize("seeds", [90, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_parquet_never_breaks_the_reader(tmp_path, seeds):
    """Cut, flipped and overwritten in every part; each is read in a process that must live on."""
    measured = read_hostile(
        tmp_path,
        PARQUET,
        """
        turns = [[{"role": "user", "content": "x" * n}] for n in range(50)]
        rows = [{"prompt": f"q{n}", "messages": turns[n], "n": n} for n in range(50)]
        write_parquet(pa.Table.from_pylist(rows), row_group_size=20)
        """,
        warm=f"""
        import random
        SEEDS = {seeds}
        from graftwork.data.ingest.parquet_child import decode
        whole = Path("log.parquet").read_bytes()
        """,
        attack="""
        seen = set()
        for seed in range(SEEDS):
            dice = random.Random(seed)
            data = bytearray(whole)
            if seed % 3 == 0:
                data = data[: dice.randint(4, len(data))]
            for _ in range(dice.randint(seed % 3, 4)):
                data[dice.randrange(4, len(data)) if len(data) > 4 else 0] = dice.randrange(256)
            Path("bad.parquet").write_bytes(data)
            seen |= {frame[0] for frame in decode(Path("bad.parquet"), longest=M)}
        print(sorted(seen))
        """,
    )
    assert measured.code == 0, measured
    assert "b'd'" in measured.output
    assert "b'r'" in measured.output
    assert measured.grown < 1000, measured


def test_a_decoder_that_dies_is_a_fault_at_its_place():
    frames = child.HEAD.pack(child.ROW, 1, 2) + b"{}" + child.HEAD.pack(child.ROW, 2, 5) + b"{"
    read = list(_read_frames(io.BytesIO(frames), memory=256 << 20, longest=100))
    assert read[0] == Entry(1, b"{}")
    assert len(read) == 2
    assert "cannot be decoded" in read[1].message
