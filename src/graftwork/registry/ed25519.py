"""Ed25519 (RFC 8032): signed through the package `cryptography` where it is installed, else in plain Python.

In: keys, messages, signatures, all bytes. Out: whether they belong together; a signature. The plain way takes
milliseconds and does not hide the time it takes: it verifies safely, and signs safely on a machine that
nobody else measures.
"""

import hashlib
import importlib
from typing import NamedTuple

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)


class _Point(NamedTuple):
    """Extended coordinates: x = X/Z, y = Y/Z, T = XY/Z."""

    x: int
    y: int
    z: int
    t: int


_NEUTRAL = _Point(0, 1, 1, 0)


def public_of(seed: bytes) -> bytes:
    """The public key of a secret seed of 32 bytes."""
    scalar, _ = _expand(seed)
    return _pack(_times(scalar, _base()))


def sign(message: bytes, *, seed: bytes) -> bytes:
    try:
        package = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        return _sign_plainly(message, seed=seed)
    return bytes(package.Ed25519PrivateKey.from_private_bytes(seed).sign(message))


def is_signed(message: bytes, *, signature: bytes, public: bytes) -> bool:
    """Whether the holder of the key signed exactly this message."""
    if len(signature) != 64 or len(public) != 32:
        return False
    key, point = _unpack(public), _unpack(signature[:32])
    scalar = int.from_bytes(signature[32:], "little")
    # A scalar beyond the order would let others make a second valid signature out of the first.
    if key is None or point is None or scalar >= _ORDER:
        return False
    challenge = _hash_to_scalar(signature[:32] + public + message)
    return _same(_times(scalar, _base()), _add(point, _times(challenge, key)))


def _sign_plainly(message: bytes, *, seed: bytes) -> bytes:
    scalar, prefix = _expand(seed)
    public = _pack(_times(scalar, _base()))
    nonce = _hash_to_scalar(prefix + message)
    point = _pack(_times(nonce, _base()))
    challenge = _hash_to_scalar(point + public + message)
    return point + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def _expand(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & ((1 << 254) - 8) | (1 << 254), digest[32:]


def _hash_to_scalar(data: bytes) -> int:
    return int.from_bytes(hashlib.sha512(data).digest(), "little") % _ORDER


def _add(a: _Point, b: _Point) -> _Point:
    minus, plus = (a.y - a.x) * (b.y - b.x) % _P, (a.y + a.x) * (b.y + b.x) % _P
    c, d = 2 * a.t * b.t * _D % _P, 2 * a.z * b.z % _P
    e, f, g, h = plus - minus, d - c, d + c, plus + minus
    return _Point(e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _times(scalar: int, point: _Point) -> _Point:
    result = _NEUTRAL
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _same(a: _Point, b: _Point) -> bool:
    return (a.x * b.z - b.x * a.z) % _P == 0 and (a.y * b.z - b.y * a.z) % _P == 0


def _base() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    x = _find_x(y, sign=0)
    assert x is not None
    return _Point(x, y, 1, x * y % _P)


def _find_x(y: int, *, sign: int) -> int | None:
    """The x of the point with this y, or None where there is none."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    return _P - x if x & 1 != sign else x


def _pack(point: _Point) -> bytes:
    inverse = pow(point.z, -1, _P)
    x, y = point.x * inverse % _P, point.y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _unpack(data: bytes) -> _Point | None:
    number = int.from_bytes(data, "little")
    y, sign = number & ((1 << 255) - 1), number >> 255
    if y >= _P:
        return None
    x = _find_x(y, sign=sign)
    return None if x is None else _Point(x, y, 1, x * y % _P)
