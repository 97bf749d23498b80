"""Blocks: a few MiB of JSON lines of one file, identified by their content.

Input: the bytes of a file or of standard input, compressed or not. Output: decompressed UTF-8 chunks, lines,
and blocks that are cut only by content, so that appending to a file changes only its last block. A line
beyond the limit is measured and reported, never held. Where a stream is damaged the chunks end, and `damage`
says why. Does not parse rows.
"""

import codecs
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Literal, NamedTuple

from graftwork.records.base import Record
from graftwork.records.interaction import Interaction, Origin

FaultCode = Literal["parse_error", "schema", "encoding"]


class ReadFault(Record):
    """A row that could not be read: where, and why. Never quotes the row."""

    origin: Origin
    code: FaultCode
    message: str


class SkippedPart(Record):
    """Parts of a line that are not exchanges, such as the spans of tools: the rule, and how many.

    A call without content has its ids: its messages may be in another file.
    """

    origin: Origin
    rule: str
    count: int
    trace: str | None = None
    call: str | None = None


IN_OTHER_FILE = "content_in_other_file"
"""The rule of a span without messages whose call is a row: log records in another file have them."""


class TraceScore(Record):
    """A score of a trace, or of one of its calls, that is logged separately."""

    origin: Origin
    trace: str
    call: str | None
    value: float


RowResult = Interaction | ReadFault | SkippedPart | TraceScore
"""What a row holds. Usually it is one interaction."""


class Flaw(NamedTuple):
    """A fault as a container reports it, without the name of the file."""

    line: int
    code: FaultCode
    message: str


def name_size(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size} bytes"


def too_long(line: int, size: int, *, longest: int) -> Flaw:
    limit = name_size(longest)
    # Just over the limit, both sizes would be written alike.
    actual = f"more than {limit}" if name_size(size) == limit else name_size(size)
    return Flaw(line, "parse_error", f"the row has {actual}, and one row may have {limit}")


BLOCK_SIZE = 4 << 20
MAX_LINE = 32 << 20
MOST_LINES = 1 << 16
"""The most lines of one block. Features of a row take hundreds of bytes, and the shortest rows have two."""
_LEAST_WEIGHT, _WEIGHT_OF_FLAW = 64, 512
"""The least weight of a row and of a fault, for the same reason."""
Transcript = Literal["claude_code", "codex"]
Kind = Literal["lines", "records", Transcript]
_TRANSCRIPTS: dict[Kind, Transcript] = {"claude_code": "claude_code", "codex": "codex"}


class LogBlock(NamedTuple):
    """JSON lines of one file. The same `key` means the same rows, whatever the file is called.

    `first_line` counts from 1. `offsets` is the line of each record relative to it; None if every line is a
    record, blank lines included.
    """

    file: str
    index: int  # type: ignore[assignment]  # the number of the block, not the method of tuples
    key: str
    first_line: int
    data: bytes
    offsets: tuple[int, ...] | None
    faults: tuple[ReadFault, ...] = ()
    transcript: Transcript | None = None
    """Set where lines continue a conversation that earlier lines of the block began."""


class Entry(NamedTuple):
    """One record of a container that is not made of lines: its JSON on one line."""

    line: int
    data: bytes


def make_block(
    file: str,
    *,
    kind: Kind,
    first_line: int,
    data: bytes,
    offsets: tuple[int, ...] | None = None,
    flaws: Iterable[Flaw] = (),
) -> LogBlock:
    """Make a block with its key. The caller sets its index."""
    digest = hashlib.sha256(f"graftwork block 1 {kind} {offsets}".encode())
    faults = []
    for flaw in flaws:
        digest.update(f"\0{flaw.line - first_line} {flaw.code} {flaw.message}".encode())
        origin = Origin(file=file, line=flaw.line)
        faults.append(ReadFault(origin=origin, code=flaw.code, message=flaw.message))
    digest.update(b"\n")
    digest.update(data)
    transcript = _TRANSCRIPTS.get(kind)
    return LogBlock(file, 0, digest.hexdigest(), first_line, data, offsets, tuple(faults), transcript)


def gather_blocks(records: Iterable[Entry | Flaw], *, file: str, size: int) -> Iterator[LogBlock]:
    """Gather records into blocks; a block ends before the record that would exceed `size`."""
    # One bytearray: a short row as an object of its own takes up to four kilobytes, because the JSON library
    # allocates a large buffer for each and shrinks it.
    data = bytearray()
    lines: list[int] = []
    flaws: list[Flaw] = []
    weight = 0
    for record in records:
        cost = max(_LEAST_WEIGHT, len(record.data) + 1) if isinstance(record, Entry) else _WEIGHT_OF_FLAW
        if weight and weight + cost > size:
            yield _gather(file, bytes(data), lines, flaws)
            data, lines, flaws, weight = bytearray(), [], [], 0
        weight += cost
        if isinstance(record, Entry):
            data += record.data
            data += b"\n"
            lines.append(record.line)
        else:
            flaws.append(record)
    if weight:
        yield _gather(file, bytes(data), lines, flaws)


def _gather(file: str, data: bytes, lines: list[int], flaws: list[Flaw]) -> LogBlock:
    first_line = min([*lines, *(flaw.line for flaw in flaws)])
    offsets = tuple(line - first_line for line in lines)
    return make_block(
        file,
        kind="records",
        first_line=first_line,
        data=data,
        offsets=None if offsets == tuple(range(len(lines))) else offsets,
        flaws=flaws,
    )


CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# One slice of zstd can decompress to 32,768 times its size: small slices keep a hostile file harmless.
_ZSTD_SLICE = 1024
_GZIP_SLICE = 1 << 16
MOST_GROWTH = 1000
"""Compressed data may decompress to at most this many times its size. Logs reach 10 to 20, bombs 32,768."""
ALWAYS_UNPACKED = 64 << 20
"""This much is always decompressed, whatever its compressed size."""


class _Damage(Exception):
    """The compressed stream cannot be decompressed any further."""


class ByteStream:
    """Iterate to get the chunks. `head` is the start of the decompressed bytes."""

    def __init__(self, handle: IO[bytes], *, size: int | None) -> None:
        """`size` is where reading ends, so that a file that grows meanwhile is read as it was."""
        self.damage: str | None = None
        self._chunks = _to_utf8(self._unpack(_read(handle, size)))
        first = next(self._chunks, b"")
        # A pipe may deliver its first bytes one by one.
        while len(first) < 4096 and (chunk := next(self._chunks, b"")):
            first += chunk
        self._first = first.removeprefix(BOM)
        self.head = self._first[:65536]

    def __iter__(self) -> Iterator[bytes]:
        if self._first:
            first, self._first = self._first, b""
            yield first
        yield from self._chunks

    def _unpack(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        first = next(chunks, b"")
        while len(first) < 4 and (chunk := next(chunks, b"")):
            first += chunk
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
    remaining = size
    while remaining is None or remaining > 0:
        chunk = handle.read(CHUNK if remaining is None else min(CHUNK, remaining))
        if not chunk:
            return
        if remaining is not None:
            remaining -= len(chunk)
        yield chunk


def _to_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Convert UTF-16, recognized by its first two bytes, to UTF-8."""
    first = next(chunks, b"")
    while len(first) < 2 and (following := next(chunks, b"")):
        first += following
    encoding = _WIDE.get(first[:2])
    if encoding is None:
        yield from _chain(first, chunks)
        return
    # Half a character becomes the replacement character.
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in _chain(first[2:], chunks):
        text = decoder.decode(chunk)
        if text:
            yield text.encode()
    tail = decoder.decode(b"", final=True)
    if tail:
        yield tail.encode()


def _chain(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from chunks


def _bound_growth(
    packed: Iterator[bytes], unpack: Callable[[Iterator[bytes]], Iterator[bytes]]
) -> Iterator[bytes]:
    """Decompress the chunks, up to a ratio that no log reaches."""
    packed_bytes = unpacked_bytes = 0

    def counted() -> Iterator[bytes]:
        nonlocal packed_bytes
        for chunk in packed:
            packed_bytes += len(chunk)
            yield chunk

    for data in unpack(counted()):
        unpacked_bytes += len(data)
        if unpacked_bytes > ALWAYS_UNPACKED + MOST_GROWTH * packed_bytes:
            raise _Damage(f"the packed stream unpacks to more than {MOST_GROWTH:,} times its size")
        yield data


def _unpack_gzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        for offset in range(0, len(chunk), _GZIP_SLICE):
            packed = chunk[offset : offset + _GZIP_SLICE]
            while packed:
                if unpacker.eof:
                    # Members may follow each other, with padding between them.
                    packed = packed.lstrip(b"\0")
                    unpacker = zlib.decompressobj(wbits=31) if packed else unpacker
                    continue
                data, is_damaged = _unpack_slice(unpacker, packed)
                if data:
                    yield data
                if is_damaged:
                    raise _Damage("the gzip stream is damaged")
                packed = unpacker.unconsumed_tail or unpacker.unused_data
    if not unpacker.eof:
        raise _Damage("the gzip stream ends too early")


def _unpack_slice(unpacker: "zlib._Decompress", data: bytes) -> tuple[bytes, bool]:
    """Decompress one slice, and say whether it is damaged: then everything that can be recovered."""
    before = unpacker.copy()
    try:
        return unpacker.decompress(data, CHUNK), False
    except zlib.error:
        pass
    saved = bytearray()
    try:
        for offset in range(len(data)):
            saved += before.decompress(data[offset : offset + 1])
    except zlib.error:
        pass
    return bytes(saved), True


def _unpack_zstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    for chunk in chunks:
        for offset in range(0, len(chunk), _ZSTD_SLICE):
            packed = chunk[offset : offset + _ZSTD_SLICE]
            while packed:
                if unpacker.eof:
                    unpacker = zstandard.ZstdDecompressor().decompressobj()
                try:
                    data = unpacker.decompress(packed)
                except zstandard.ZstdError:
                    raise _Damage("the zstd stream is damaged") from None
                if data:
                    yield data
                packed = unpacker.unused_data if unpacker.eof else b""
    if not unpacker.eof:
        raise _Damage("the zstd stream ends too early")


_FEW_LINES = 64


def cut_lines(stream: ByteStream, *, file: str, size: int, longest: int) -> Iterator[LogBlock]:
    """Yield blocks of whole lines: each ends at the last line end within `size`, or at the first beyond.

    A block of very short lines ends after MOST_LINES. So a block depends on nothing after it. A line longer
    than `longest` is a block by itself, with a fault in place of data.
    """
    size, line = min(size, longest), 1
    buffer, start = b"", 0
    chunks = iter(stream)
    for chunk in chunks:
        buffer, start = buffer[start:] + chunk, 0
        while len(buffer) - start >= size:
            within = start + size
            end = buffer.rfind(b"\n", start, within) + 1 or buffer.find(b"\n", within) + 1
            if not end and len(buffer) - start <= longest:
                break
            if not end or end - start - 1 > longest:
                length, buffer = _skip_line(buffer[start:], chunks)
                flaw = too_long(line, length, longest=longest)
                yield make_block(file, kind="lines", first_line=line, data=b"", flaws=[flaw])
                start, line = 0, line + 1
                continue
            end = _end_of_lines(buffer, start, end)
            data, start = buffer[start:end], end
            yield make_block(file, kind="lines", first_line=line, data=data)
            line += data.count(b"\n")
    buffer = buffer[start:]
    while (end := _end_of_lines(buffer, 0, len(buffer))) < len(buffer):
        yield make_block(file, kind="lines", first_line=line, data=buffer[:end])
        buffer, line = buffer[end:], line + MOST_LINES
    if stream.damage:
        buffer = buffer[: buffer.rfind(b"\n") + 1]
        broken = Flaw(line + buffer.count(b"\n"), "parse_error", f"{stream.damage}; the rows before are read")
        yield make_block(file, kind="lines", first_line=line, data=buffer, flaws=[broken])
    elif buffer:
        yield make_block(file, kind="lines", first_line=line, data=buffer)


def _end_of_lines(data: bytes, start: int, end: int) -> int:
    """Return `end`, or the end of the last line that a block starting at `start` may have."""
    offset, lines_left = start, MOST_LINES
    while lines_left > _FEW_LINES and offset < end:
        # This many bytes hold at most this many line ends: the last one is not skipped.
        step = min(offset + lines_left, end)
        lines_left -= data.count(b"\n", offset, step)
        offset = step
    while lines_left and offset < end:
        offset = data.find(b"\n", offset, end) + 1 or end
        lines_left -= 1
    return offset


def split_lines(chunks: Iterable[bytes], *, line: int, longest: int) -> Iterator[Entry | Flaw]:
    """Yield lines with their line ends; a line beyond the limit is a flaw."""
    source = iter(chunks)
    partial = b""
    for chunk in source:
        *whole, partial = (partial + chunk).split(b"\n")
        while whole or len(partial) > longest:
            for data in whole:
                fits = len(data) <= longest
                yield Entry(line, data + b"\n") if fits else too_long(line, len(data), longest=longest)
                line += 1
            whole = []
            if len(partial) > longest:
                size, remaining = _skip_line(partial, source)
                yield too_long(line, size, longest=longest)
                *whole, partial = remaining.split(b"\n")
                line += 1
    if partial:
        yield Entry(line, partial)


def _skip_line(line_start: bytes, chunks: Iterator[bytes]) -> tuple[int, bytes]:
    """Read to the end of a line without holding it. Returns its size, and what follows it."""
    size = 0
    data: bytes | None = line_start
    while data is not None:
        end = data.find(b"\n")
        if end >= 0:
            return size + end, data[end + 1 :]
        size += len(data)
        data = next(chunks, None)
    return size, b""
