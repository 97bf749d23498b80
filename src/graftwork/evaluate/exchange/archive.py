"""The members of an `.eval` archive: a zip whose parts are packed with deflate or zstd.

In: a path. Out: the bytes of its JSON members, checked by their CRC. Python reads zstd in zip files only
from 3.14 on, so zstd is unpacked here. Nothing is written to the disk: a member's name can lead nowhere.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from graftwork.evaluate.exchange.foreign import MOST_BYTES, too_large
from graftwork.files.disk import explain_os_error
from graftwork.records.errors import Damaged

ZSTD = 93
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def read_members(path: Path, *, wanted: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Every member whose name begins with one of `wanted`, in the order of the archive."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = [m for m in archive.infolist() if m.filename.startswith(wanted)]
            if sum(member.file_size for member in members) > MOST_BYTES:
                raise too_large(path)
            for member in members:
                yield member.filename, _read(archive, file, member, path)
    except OSError as error:
        raise explain_os_error(error, path) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _damaged(path, str(error)) from error


def _read(archive: zipfile.ZipFile, file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> bytes:
    if member.compress_type != ZSTD:
        return archive.read(member)
    import zstandard

    packed = io.BytesIO(_raw(file, member, path))
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as stream:
            # One byte more than promised: a member that lies about its size is seen.
            content = stream.read(member.file_size + 1)
    except zstandard.ZstdError as error:
        raise _damaged(path, f"{member.filename}: {error}") from error
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise _damaged(path, f"{member.filename} does not have the bytes that the archive promises")
    return content


def _raw(file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> bytes:
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise _damaged(path, f"{member.filename} is cut off")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    file.seek(name_length + extra_length, io.SEEK_CUR)
    return file.read(member.compress_size)


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(
        "the archive cannot be read",
        why=why,
        fix="copy it whole, or write it as JSON: `inspect log convert --to json`",
        where=str(path),
    )
