"""The bytes of single tokens: a token of a byte-level vocabulary need not be whole characters."""

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_to_bytes(piece: str, *, byte_level: bool) -> bytes:
    """`piece` is the token as the vocabulary writes it."""
    if byte_level:
        table = _byte_table()
        if all(char in table for char in piece):
            return bytes(table[char] for char in piece)
        return piece.encode()
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace("\u2581", " ").encode()


@cache
def _byte_table() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, the others as characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
