"""Messages on a byte stream come back as they were, however the bytes arrive."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.process.stdio import FramingError, encode, read_messages

MESSAGES = st.lists(st.binary(min_size=1, max_size=50).map(lambda text: text.hex().encode()), max_size=8)


class Dripping(io.RawIOBase):
    """Gives as many bytes at a time as it likes."""

    def __init__(self, data, sizes):
        self._data, self._sizes = data, sizes

    def readable(self):
        return True

    def readinto(self, buffer):
        most = max(1, next(self._sizes, 1))
        piece, self._data = self._data[: min(most, len(buffer))], self._data[min(most, len(buffer)) :]
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("framing", ["lines", "packet4"])
@given(messages=MESSAGES, sizes=st.lists(st.integers(1, 9), max_size=40))
@settings(max_examples=60, deadline=None)
def test_messages_come_back_whatever_the_pieces(framing, messages, sizes):
    data = b"".join(encode(message, framing) for message in messages)
    stream = io.BufferedReader(Dripping(data, iter(sizes)), buffer_size=4)
    assert list(read_messages(stream, framing)) == messages


@pytest.mark.parametrize("framing", ["lines", "packet4"])
@given(messages=MESSAGES, cut=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_message_that_is_cut_off_is_dropped(framing, messages, cut):
    data = b"".join(encode(message, framing) for message in messages)
    found = list(read_messages(io.BytesIO(data[: min(cut, len(data))]), framing))
    assert found == messages[: len(found)]


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_messages_or_a_framing_error(data):
    for framing in ("lines", "packet4"):
        try:
            found = list(read_messages(io.BytesIO(data), framing, longest=64))
        except FramingError:
            continue
        assert all(len(message) <= 64 for message in found)


def test_a_message_beyond_the_limit_is_refused_before_it_is_read():
    with pytest.raises(FramingError, match="4,294,967,295"):
        list(read_messages(io.BytesIO(b"\xff\xff\xff\xff"), "packet4"))
    with pytest.raises(FramingError, match="longer"):
        list(read_messages(io.BytesIO(b"x" * 100), "lines", longest=10))


def test_a_line_break_in_a_line_is_refused():
    with pytest.raises(FramingError):
        encode(b"a\nb", "lines")
