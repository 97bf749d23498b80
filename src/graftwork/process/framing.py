"""Messages on a byte stream: a line each, or with their length in four bytes before them.

In: bytes as they arrive. Out: whole messages. `{packet, 4}` is the framing of Erlang's ports.
"""

from collections.abc import Iterator
from typing import BinaryIO, Literal

Framing = Literal["lines", "packet4"]
LONGEST_MESSAGE = 2**20
_HEAD = 4


class FramingError(ValueError):
    """The stream is no sequence of messages."""


def encode(message: bytes, framing: Framing) -> bytes:
    """One message as it goes onto the stream."""
    if framing == "packet4":
        return len(message).to_bytes(_HEAD) + message
    if b"\n" in message:
        raise FramingError("a message in a line of its own has no line break")
    return message + b"\n"


def read_messages(stream: BinaryIO, framing: Framing, *, longest: int = LONGEST_MESSAGE) -> Iterator[bytes]:
    """Messages until the stream ends. A message that is cut off by the end is dropped."""
    while framing == "lines" and (line := stream.readline(longest + 1)):
        if not line.endswith(b"\n"):
            if len(line) > longest:
                raise FramingError(f"a line is longer than {longest:,} bytes")
            return
        if text := line.strip():
            yield text
    while framing == "packet4" and len(head := _read_exactly(stream, _HEAD)) == _HEAD:
        length = int.from_bytes(head)
        if length > longest:
            raise FramingError(f"a message of {length:,} bytes; the most is {longest:,}")
        message = _read_exactly(stream, length)
        if len(message) < length:
            return
        if message:
            yield message


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    """So many bytes, or fewer at the end of the stream."""
    pieces: list[bytes] = []
    left = length
    while left and (piece := stream.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
