"""Packing loses no row, divides none, wastes little, and documents cannot see each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.render.dataset import boundaries, pack_rows

LENGTHS = st.lists(st.integers(1, 64), max_size=200)


def rows_of(packed):
    order, ends = (array.tolist() for array in packed)
    return [order[a:b] for a, b in itertools.pairwise(ends)]


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, length=st.integers(64, 200))
def test_every_row_is_in_exactly_one_sequence_and_no_sequence_is_too_long(lengths, length):
    sequences = rows_of(pack_rows(lengths, length=length))
    assert sorted(row for rows in sequences for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= length for rows in sequences)


def fit_slowly(lengths, length):
    """Best fit decreasing by looking at every sequence."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= size]
        best = min(fitting, default=length)
        if fitting:
            rooms.remove(best)
        rooms.append(best - size)
    return sorted(rooms)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_packing_is_best_fit_decreasing(lengths):
    sequences = rows_of(pack_rows(lengths, length=64))
    assert sorted(64 - sum(lengths[row] for row in rows) for rows in sequences) == fit_slowly(lengths, 64)


def test_nothing_packs_into_nothing():
    packed = pack_rows([], length=8)
    assert rows_of(packed) == []
    assert rows_of(packed) == []


@pytest.mark.parametrize("lengths", [[9], [0, 3], [-1]])
def test_a_row_that_fits_nowhere_is_a_mistake_and_not_cut(lengths):
    with pytest.raises(ValueError, match="every row must have 1 to 8 tokens"):
        pack_rows(lengths, length=8)


def test_two_hundred_thousand_rows_fill_their_sequences():
    lengths = np.random.default_rng(0).integers(16, 1024, 200_000)
    packed = pack_rows(lengths, length=2048)
    assert lengths.sum() / (len(rows_of(packed)) * 2048) > 0.995


def test_documents_in_one_sequence_do_not_see_each_other(tiny_base):
    """With the mask that the boundaries describe, each document gives the logits that it gives alone."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_base, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 49152, (size,), generator=random) for size in (13, 7, 1, 21)]
    sizes = [len(document) for document in documents]
    (rows,) = rows_of(pack_rows(sizes, length=64))
    packed = [sizes[row] for row in rows]
    total = sum(packed)
    document_of = torch.from_numpy(np.searchsorted(boundaries(packed)[1:], np.arange(total), side="right"))
    sees = (document_of[:, None] == document_of[None, :]) & torch.ones(total, total).tril().bool()
    mask = torch.zeros(total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        together = model(
            torch.cat([documents[row] for row in rows])[None],
            attention_mask=mask[None, None],
            position_ids=torch.cat([torch.arange(size) for size in packed])[None],
        ).logits[0]
        for row, start in zip(rows, boundaries(packed).tolist(), strict=False):
            alone = model(documents[row][None]).logits[0]
            torch.testing.assert_close(together[start : start + sizes[row]], alone, rtol=1e-4, atol=1e-4)
