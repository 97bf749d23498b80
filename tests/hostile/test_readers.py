"""Hostile files against everything that reads one: bombs, nesting, huge lines, damage.

Each promise is the same: the reader ends, with an error or fault of ours that names the place, and its memory
stays bounded. Memory is measured in a child process.
"""

import textwrap

import pytest
from measured import measure

from graftwork.files.config_text import MOST_LEVELS, parse_json, parse_yaml
from graftwork.plan.lint.written import read_written
from graftwork.project.load import load_settings
from graftwork.records.errors import GraftError, UserMistake


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
    "deep flow": "train: " + "[" * 50_000,
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
    with pytest.raises(UserMistake) as refused:
        load_settings(path)
    assert str(path) in refused.value.where
    assert refused.value.fix
    assert len(refused.value.what) < 400


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_does_not_break_the_linter(name):
    if name == "a mebibyte too much":
        pytest.skip("the size of a file is checked where it is opened")
    with pytest.raises(UserMistake) as refused:
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
            except UserMistake as refused:
                print(refused.what)
        """,
        prepare="""
        from pathlib import Path
        from graftwork.plan.lint.written import read_written
        from graftwork.project.load import load_settings
        from graftwork.records.errors import UserMistake
        """,
    )
    assert measured.output == "this stands for more than 100,000 values\n" * 2
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
