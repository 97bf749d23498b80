"""Copies on the host: later steps do not change them, and their memory is got twice in a run."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.train import host_memory
from graftwork.train.host_memory import HostCopies


def lots(monkeypatch):
    """Without a card there are no pages to pin: count instead how often some are asked for."""
    asked = []

    def pinned(size):
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "pinned_buffer", pinned)
    return asked


def test_a_copy_is_not_changed_by_the_next_step():
    weight = torch.ones(3)
    copy = HostCopies().take({"weight": weight})["weight"]
    weight.zero_()
    assert copy.tolist() == [1.0, 1.0, 1.0]


def test_memory_is_got_once_for_each_of_two_lots(monkeypatch):
    asked = lots(monkeypatch)
    copies = HostCopies()
    places = [copies._allocate([torch.zeros(100), torch.zeros(())])[0].data_ptr() for _ in range(6)]
    assert len(asked) == 2
    assert places[0::2] == [places[0]] * 3
    assert places[0] != places[1]


def test_a_state_that_grew_gets_more_room(monkeypatch):
    asked = lots(monkeypatch)
    copies = HostCopies()
    for size in (10, 10, 1000, 1000):
        assert copies._allocate([torch.zeros(size)])[0].numel() == size
    assert len(asked) == 4


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_places_have_the_shape_asked_for_and_do_not_overlap(shapes, dtype):
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    before, host_memory.pinned_buffer = (
        host_memory.pinned_buffer,
        lambda size: torch.zeros(size, dtype=torch.uint8),
    )
    try:
        room = HostCopies()._allocate(tensors)
    finally:
        host_memory.pinned_buffer = before
    for number, place in enumerate(room):
        place.fill_(number)
    found = [place for place in room if place.numel()]
    assert all((place == number).all() for number, place in enumerate(room) if place.numel())
    assert [tuple(place.shape) for place in room] == [tuple(tensor.shape) for tensor in tensors[: len(room)]]
    assert len(found) == sum(1 for tensor in tensors if tensor.numel())
