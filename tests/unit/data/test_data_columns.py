"""Columns that are kept between runs give the same values as those that are read again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.corpus.columns import ColumnCache


class Blocks:
    """Parts by name, and which of them were read."""

    def __init__(self, **parts):
        self.parts, self.read_names = parts, []

    def keys(self, names):
        return [(name, 0, len(self.parts[name])) for name in names]

    def reader(self, names):
        def read(number):
            self.read_names.append(names[number])
            return np.array(self.parts[names[number]], dtype=np.uint64)

        return read


def column(cache, blocks, names):
    found = cache.get("c", blocks.keys(names), blocks.reader(names))
    cache.save()
    assert found.sizes == [len(blocks.parts[name]) for name in names]
    return found.values.tolist()


def test_only_new_parts_are_read_again(tmp_path):
    blocks = Blocks(a=[1, 2], b=[3], b2=[3, 4], c=[5])
    assert column(ColumnCache(tmp_path), blocks, ["a", "b"]) == [1, 2, 3]
    # The last block of a log that has grown is another one.
    assert column(ColumnCache(tmp_path), blocks, ["a", "b2", "c"]) == [1, 2, 3, 4, 5]
    assert blocks.read_names == ["a", "b", "b2", "c"]


@pytest.mark.parametrize("damage", [b"", b"\0" * 24, b"short"])
def test_a_damaged_file_is_read_again_from_the_blocks(tmp_path, damage):
    blocks = Blocks(a=[1, 2], b=[3])
    column(ColumnCache(tmp_path), blocks, ["a", "b"])
    (tmp_path / "c.bin").write_bytes(damage)
    assert column(ColumnCache(tmp_path), blocks, ["a", "b"]) == [1, 2, 3]
    (tmp_path / "index.json").write_bytes(b"[")
    assert column(ColumnCache(tmp_path), blocks, ["a", "b"]) == [1, 2, 3]


NAMES = st.lists(st.sampled_from("vwxyz"), max_size=4)


@given(runs=st.lists(st.lists(st.tuples(st.integers(0, 99), NAMES), min_size=1, max_size=5), max_size=4))
def test_labels_are_numbered_as_if_all_were_read_at_once(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("columns")
    for run in runs:
        # The name of a part is that of its content.
        keys = [(f"{number}-{'.'.join(names)}", 0, len(names)) for number, names in run]

        def read(number, run=run):
            labels = list(dict.fromkeys(run[number][1]))
            return np.array([labels.index(name) for name in run[number][1]], dtype=np.int64), labels

        cache = ColumnCache(folder)
        numbers, names = cache.labels("l", keys, read)
        cache.save()
        flat = [name for _, part in run for name in part]
        assert [names[number] for number in numbers] == flat
        assert names == list(dict.fromkeys(flat))
