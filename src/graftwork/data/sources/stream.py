"""The bytes of one file or of standard input, unpacked, chunk by chunk.

In: an open handle. Out: chunks without a byte-order mark, those of UTF-16 as UTF-8; where the stream
is damaged the chunks end there, and `damage` says why. Packing and encoding are told by the first
bytes, since names lie. Does not know what the bytes mean, and never holds more than a few chunks.
"""

import codecs
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# One slice of zstd can unpack to 32,768 times its size: small slices keep a hostile file harmless.
_ZSTD_SLICE = 1024
_GZIP_SLICE = 1 << 16
MOST_GROWTH = 1000
"""What is packed may unpack to so many times its size. Logs reach ten or twenty; bombs reach 32,768."""
ALWAYS_UNPACKED = 64 << 20
"""So much is unpacked whatever it was packed to."""


class _Damage(Exception):
    """The packed stream cannot be unpacked any further."""


class Unpacked(NamedTuple):
    data: bytes
    damage: str | None


class Stream:
    """Iterate to get the chunks. `head` is the beginning of the unpacked bytes, known at once."""

    def __init__(self, handle: IO[bytes], *, size: int | None) -> None:
        """`size` is where reading ends, so that a file that grows meanwhile is read as it was."""
        self.damage: str | None = None
        self._chunks = _to_utf8(self._unpack(_read(handle, size)))
        first = next(self._chunks, b"")
        # A stream may give its first bytes one by one.
        while len(first) < 4096 and (more := next(self._chunks, b"")):
            first += more
        self._first = first.removeprefix(BOM)
        self.head = self._first[:65536]

    def __iter__(self) -> Iterator[bytes]:
        if self._first:
            first, self._first = self._first, b""
            yield first
        yield from self._chunks

    def _unpack(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        first = next(chunks, b"")
        while len(first) < 4 and (more := next(chunks, b"")):
            first += more
        packed = _chain(first, chunks)
        try:
            if first.startswith(_GZIP):
                yield from _bound_growth(packed, _unpack_gzip)
            elif first.startswith(_ZSTD) or (first[1:4] == b"\x2a\x4d\x18" and first[0] >> 4 == 5):
                yield from _bound_growth(packed, _unpack_zstd)
            else:
                yield from packed
        except _Damage as damage:
            self.damage = str(damage)


def _read(handle: IO[bytes], size: int | None) -> Iterator[bytes]:
    left = size
    while left is None or left > 0:
        chunk = handle.read(CHUNK if left is None else min(CHUNK, left))
        if not chunk:
            return
        if left is not None:
            left -= len(chunk)
        yield chunk


def _to_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16 as UTF-8, told by its first two bytes; anything else as it is."""
    first = next(chunks, b"")
    while len(first) < 2 and (more := next(chunks, b"")):
        first += more
    encoding = _WIDE.get(first[:2])
    if encoding is None:
        yield from _chain(first, chunks)
        return
    # Half a character is for the sign of what cannot be read, as in any text.
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in _chain(first[2:], chunks):
        text = decoder.decode(chunk)
        if text:
            yield text.encode()
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest.encode()


def _chain(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from chunks


def _bound_growth(
    packed: Iterator[bytes], unpack: Callable[[Iterator[bytes]], Iterator[bytes]]
) -> Iterator[bytes]:
    """What `unpack` makes of the chunks, until that is more than any log packs to."""
    taken = given = 0

    def counted() -> Iterator[bytes]:
        nonlocal taken
        for chunk in packed:
            taken += len(chunk)
            yield chunk

    for data in unpack(counted()):
        given += len(data)
        if given > ALWAYS_UNPACKED + MOST_GROWTH * taken:
            raise _Damage(f"the packed stream unpacks to more than {MOST_GROWTH:,} times its size")
        yield data


def _unpack_gzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        for place in range(0, len(chunk), _GZIP_SLICE):
            left = chunk[place : place + _GZIP_SLICE]
            while left:
                if unpacker.eof:
                    # Members may follow each other; padding between them is of no meaning.
                    left = left.lstrip(b"\0")
                    unpacker = zlib.decompressobj(wbits=31) if left else unpacker
                    continue
                done = _unpack_slice(unpacker, left)
                if done.data:
                    yield done.data
                if done.damage:
                    raise _Damage(done.damage)
                left = unpacker.unconsumed_tail or unpacker.unused_data
    if not unpacker.eof:
        raise _Damage("the gzip stream ends too early")


def _unpack_slice(unpacker: "zlib._Decompress", data: bytes) -> Unpacked:
    """What comes out of one slice; before a damaged place, all that can be had."""
    before = unpacker.copy()
    try:
        return Unpacked(unpacker.decompress(data, CHUNK), None)
    except zlib.error:
        pass
    saved = bytearray()
    try:
        for place in range(len(data)):
            saved += before.decompress(data[place : place + 1])
    except zlib.error:
        pass
    return Unpacked(bytes(saved), "the gzip stream is damaged")


def _unpack_zstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    for chunk in chunks:
        for place in range(0, len(chunk), _ZSTD_SLICE):
            left = chunk[place : place + _ZSTD_SLICE]
            while left:
                if unpacker.eof:
                    unpacker = zstandard.ZstdDecompressor().decompressobj()
                try:
                    data = unpacker.decompress(left)
                except zstandard.ZstdError:
                    raise _Damage("the zstd stream is damaged") from None
                if data:
                    yield data
                left = unpacker.unused_data if unpacker.eof else b""
    if not unpacker.eof:
        raise _Damage("the zstd stream ends too early")
