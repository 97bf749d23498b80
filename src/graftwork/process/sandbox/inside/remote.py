"""Names of one process used from another: the tests of an answer run apart from the answer.

Input: a socket between the two. Output: values by content, and proxies of everything else: functions, classes
and objects stay in the process that made them. The process with the tests believes nothing that the other
says: messages are plain data with bounds, and a proxy equals a plain value only where its content does, or
where the tests name its class themselves.
"""

from __future__ import annotations

import _thread
import builtins
import io
import os
import struct
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

UNSUPPORTED = b"unsupported "
_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!I")
_FLOAT = struct.Struct("!d")
_DEEPEST = 150
_MOST_BYTES = 2**30
_KEPT_OUTPUT = 65536
_CONSTANTS = (None, True, False, NotImplemented, Ellipsis)
_MUTABLE = (list, dict, set, bytearray)
_PLAIN = (int, float, complex, str, bytes, tuple, frozenset, *_MUTABLE)
_UNARY = ("__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__int__", "__float__", "__index__")
_READING = (
    *("__call__", "__iter__", "__next__", "__len__", "__bool__", "__getitem__", "__hash__", "__reversed__"),
    *("__str__", "__repr__", "__format__", "__enter__", "__exit__", "__setitem__", "__delitem__"),
)
_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_ARITHMETIC = tuple(f"__{side}{name}__" for name in (*_OPERATORS, "divmod") for side in ("", "r"))
_IN_PLACE = tuple(f"__i{name}__" for name in _OPERATORS)
_ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
_WITH_OTHERS = frozenset((*_ARITHMETIC, *_IN_PLACE, *_ORDER, "__contains__", "__eq__"))
"""Operations that an object could define to pass any comparison."""
_SPECIALS = (*_READING, *_UNARY, *_ARITHMETIC, *_IN_PLACE, *_ORDER, "__contains__", "__eq__")
_HIDDEN = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_")
"""Attributes of the tests' own objects that the answer cannot access: they lead to frames and globals."""
_COPIED_TYPES = frozenset(
    (int, float, complex, str, bytes, tuple, frozenset, list, dict, set, bytearray, bool, object, type(None))
)


class Lost(BaseException):
    """The other process has ended, or violates the protocol."""


class NotSupported(BaseException):
    """What the tests do cannot be done from another process."""


_values: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


def _parts_and_maker(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Values of the standard library that are passed by value: how they are decomposed and rebuilt."""
    if _values:
        return _values[name]
    import collections
    import datetime
    import decimal
    import fractions
    import pathlib
    import uuid

    def parts_of(delta: Any) -> tuple[int, int, int]:
        return delta.days, delta.seconds, delta.microseconds

    _values.update({
        "decimal.Decimal": (str, decimal.Decimal),
        "fractions.Fraction": (str, fractions.Fraction),
        "datetime.date": (datetime.date.isoformat, datetime.date.fromisoformat),
        "datetime.time": (datetime.time.isoformat, datetime.time.fromisoformat),
        "datetime.datetime": (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
        "datetime.timedelta": (parts_of, lambda parts: datetime.timedelta(*parts)),
        "uuid.UUID": (str, uuid.UUID),
        "pathlib.PosixPath": (str, pathlib.PosixPath),
        "pathlib.PurePosixPath": (str, pathlib.PurePosixPath),
        "collections.Counter": (dict, collections.Counter),
        "collections.OrderedDict": (lambda items: list(items.items()), collections.OrderedDict),
        "collections.defaultdict": (dict, lambda items: collections.defaultdict(None, items)),
        "collections.deque": (lambda items: (list(items), items.maxlen), lambda g: collections.deque(*g)),
        "builtins.range": (lambda r: (r.start, r.stop, r.step), lambda parts: range(*parts)),
        "builtins.slice": (lambda s: (s.start, s.stop, s.step), lambda parts: slice(*parts)),
        "numpy.ndarray": (_array_parts, _make_array),
    })  # fmt: skip
    return _values[name]


_VALUES = frozenset(
    (
        *("decimal.Decimal", "fractions.Fraction", "uuid.UUID", "builtins.range", "builtins.slice"),
        *("datetime.date", "datetime.time", "datetime.datetime", "datetime.timedelta"),
        *("pathlib.PosixPath", "pathlib.PurePosixPath"),
        *("collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque"),
        "numpy.ndarray",
    )
)


def _array_parts(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if array.dtype.kind not in "biufcSU":
        raise TypeError(f"an array of {array.dtype}")
    return array.dtype.str, array.shape, array.tobytes()


def _make_array(parts: Any) -> Any:
    import numpy

    kind, shape, content = parts
    if type(kind) is not str or kind[1:2] not in tuple("biufcSU") or not kind[2:].isdigit():
        raise ValueError("no plain array")
    array = numpy.frombuffer(content, dtype=kind).reshape(shape).copy()
    return array if shape else array[()]


def _value_name(value: object) -> str:
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return "numpy.ndarray" if value.dtype.kind in "biufcSU" else ""
    name = f"{kind.__module__.replace('pathlib._local', 'pathlib')}.{kind.__qualname__}"
    return name if name in _VALUES else ""


def _special(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


class _Writer:
    """Writes one message. `containers` are the mutable ones, in order of occurrence."""

    def __init__(self, peer: Peer, containers: list[Any]) -> None:
        self._peer, self.out, self.containers = peer, bytearray(), list(containers)
        self._positions = {id(item): position for position, item in enumerate(containers)}

    def write(self, value: Any, depth: int = 0) -> None:  # noqa: PLR0912  # one branch for each tag
        if depth > _DEEPEST:
            raise RecursionError("nested too deeply")
        kind = type(value)
        if any(value is constant for constant in _CONSTANTS):
            self._tag(b"k", next(n for n, constant in enumerate(_CONSTANTS) if constant is value))
        elif kind is int:
            self._bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        elif kind is float:
            self.out += b"f" + _FLOAT.pack(value)
        elif kind is complex:
            self.out += b"j" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag)
        elif kind is str:
            self._bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is bytes:
            self._bytes(b"b", value)
        elif kind is tuple or kind is frozenset:
            self._tag(b"t" if kind is tuple else b"z", len(value))
            for item in value:
                self.write(item, depth + 1)
        elif kind in _MUTABLE:
            if id(value) in self._positions:
                self._tag(b"m", self._positions[id(value)])
                return
            self._positions[id(value)] = len(self.containers)
            self.containers.append(value)
            self._tag(b"l", _MUTABLE.index(kind))
            self.write_content(value, depth)
        elif isinstance(value, BaseException):
            self.out += b"e"
            self._write_class(type(value), depth)
            attributes = {
                key: attribute for key, attribute in vars(value).items() if type(attribute) in _PLAIN
            }
            self.write((value.args, _text_of(value), attributes), depth + 1)
        elif name := _value_name(value):
            self._bytes(b"v", name.encode())
            self.write(_parts_and_maker(name)[0](value), depth + 1)
        elif isinstance(value, type):
            self._write_class(value, depth)
        elif issubclass(kind, Remote):
            self._tag(b"y", object.__getattribute__(value, "_number"))
        elif (
            self._peer.guards
            and kind is types.BuiltinFunctionType
            and vars(builtins).get(value.__name__) is value
        ):
            # The other process has the same; a call of it then needs nothing of this one.
            self._bytes(b"n", value.__name__.encode())  # type: ignore[union-attr]
        elif self._peer.guards and kind is types.ModuleType:
            self._bytes(b"q", value.__name__.encode())
        else:
            self._write_object(value, depth)

    def write_content(self, value: Any, depth: int = 0) -> None:
        if type(value) is bytearray:
            self.write(bytes(value), depth + 1)
        elif type(value) is dict:
            self.write(tuple(item for pair in value.items() for item in pair), depth + 1)
        else:
            self.write(tuple(value), depth + 1)

    def _tag(self, tag: bytes, number: int) -> None:
        self.out += tag + _NUMBER.pack(number)

    def _bytes(self, tag: bytes, content: bytes) -> None:
        self._tag(tag, len(content))
        self.out += content

    def _write_class(self, kind: type, depth: int) -> None:
        if vars(builtins).get(kind.__name__) is kind:
            self._bytes(b"n", kind.__name__.encode())
        elif "_remote_number" in vars(kind):
            self._tag(b"y", vars(kind)["_remote_number"])
        elif issubclass(kind, BaseException):
            self._tag(b"x", self._peer.export(kind))
            self._bytes(b"s", kind.__name__.encode())
            bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
            self._tag(b"t", len(bases))
            for base in bases:
                self._write_class(base, depth + 1)
        else:
            self._write_object(kind, depth)

    def _write_object(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._tag(
            b"c" if isinstance(value, type) else b"w" if kind is types.CoroutineType else b"o",
            self._peer.export(value),
        )
        cls = value if isinstance(value, type) else kind
        base = next((base.__name__ for base in kind.__mro__ if base in _PLAIN), "")
        mask = sum(1 << bit for bit, name in enumerate(_SPECIALS) if _special(kind, name) is not None)
        ancestors = () if self._peer.guards else kind.__mro__
        classes = tuple(
            self._peer.export(ancestor) for ancestor in ancestors if ancestor.__module__ == "answer"
        )
        self.write((cls.__name__, base, mask, classes), depth + 1)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


class _ValueReader:
    def __init__(self, peer: Peer, content: bytes, containers: list[Any]) -> None:
        self._peer, self._content, self._position, self.containers = peer, content, 0, list(containers)

    def read(self, depth: int = 0) -> Any:  # noqa: PLR0911, PLR0912  # one branch for each tag
        if depth > 2 * _DEEPEST:
            raise ValueError("nested too deeply")
        tag = self._take(1)
        if tag == b"f":
            return _FLOAT.unpack(self._take(8))[0]
        if tag == b"j":
            return complex(_FLOAT.unpack(self._take(8))[0], _FLOAT.unpack(self._take(8))[0])
        if tag == b"e":
            return self._read_error(depth)
        number = _NUMBER.unpack(self._take(4))[0]
        if tag == b"k":
            return _CONSTANTS[number]
        if tag == b"i":
            return int.from_bytes(self._take(number), "big", signed=True)
        if tag == b"s":
            return self._take(number).decode("utf-8", "surrogatepass")
        if tag == b"b":
            return self._take(number)
        if tag == b"t":
            return tuple([self.read(depth + 1) for _ in range(number)])
        if tag == b"z":
            return frozenset([self.read(depth + 1) for _ in range(number)])
        if tag == b"m":
            return self.containers[number]
        if tag == b"l":
            container: Any = _MUTABLE[number]()
            self.containers.append(container)
            fill(container, self.read(depth + 1))
            return container
        if tag == b"v":
            name = self._take(number).decode()
            return _parts_and_maker(name)[1](self.read(depth + 1))
        if tag == b"y":
            return self._peer.exported[number]
        if tag == b"n":
            return self._peer.builtin(self._take(number).decode())
        if tag == b"q":
            return self._peer.module(self._take(number).decode())
        if tag == b"x":
            return self._peer.exception_class(number, self.read(depth + 1), self.read(depth + 1))
        if tag in (b"o", b"c", b"w"):
            name, base, mask, classes = self.read(depth + 1)
            return self._peer.proxy(tag, number, name, base, mask, classes)
        raise ValueError("no such tag")

    def _take(self, count: int) -> bytes:
        part = self._content[self._position : self._position + count]
        if len(part) != count:
            raise ValueError("cut short")
        self._position += count
        return part

    def _read_error(self, depth: int) -> BaseException:
        kind, (args, text, attributes) = self.read(depth + 1), self.read(depth + 1)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)) or type(args) is not tuple:
            raise ValueError("no error")
        try:
            error = kind(*args)
        except Exception:
            error = Exception(text) if "_remote_number" not in vars(kind) else kind.__new__(kind)
            error.args = args
        if "_remote_number" in vars(kind):
            vars(error).update({**attributes, "_remote_text": text})
        return error


def fill(container: Any, content: Any) -> None:
    """Replace what a container holds."""
    if type(container) is list or type(container) is bytearray:
        container[:] = content
    elif type(container) is set:
        container.clear()
        container.update(content)
    else:
        container.clear()
        container.update(zip(content[::2], content[1::2], strict=True))


class Remote:
    """An object of the other process."""

    __slots__ = ("_base", "_classes", "_number", "_peer", "_typename")

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", self, name)

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if issubclass(type(other), Remote):
            return bool(_ask(self, "special", self, "__eq__", (other,)))
        if _is_trusted(self):
            return _ask(self, "special", self, "__eq__", (other,))
        return _content(self) == other if object.__getattribute__(self, "_base") else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(_ask(self, "special", self, "__hash__", ()))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool", self))

    def __repr__(self) -> str:
        return str(_ask(self, "special", self, "__repr__", ()))

    def __str__(self) -> str:
        return str(_ask(self, "special", self, "__str__", ()))

    def __format__(self, form: str) -> str:
        return str(_ask(self, "special", self, "__format__", (form,)))

    def __instancecheck__(self, value: object) -> bool:
        return issubclass(type(value), Remote) and bool(_ask(self, "isinstance", value, self))

    def __subclasscheck__(self, value: object) -> bool:
        return issubclass(type(value), Remote) and bool(_ask(self, "issubclass", value, self))

    def __mro_entries__(self, _bases: object) -> NoReturn:
        raise NotSupported("a class of the tests cannot inherit from one of the answer")


def _ask(remote: Remote, action: str, *args: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(action, *args)


def _is_trusted(remote: Remote) -> bool:
    """Return whether the object may be compared with a plain value: the tests name its class themselves."""
    peer: Peer = object.__getattribute__(remote, "_peer")
    return not peer.guards or any(cls in peer.named for cls in object.__getattribute__(remote, "_classes"))


def _content(remote: Remote) -> Any:
    return _ask(remote, "content", remote)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **keywords: Any) -> Any:
        if name == "__call__":
            return _ask(self, "call", self, args, keywords)
        runs_isolated = name in _WITH_OTHERS and not _is_trusted(self)
        if runs_isolated and not all(issubclass(type(arg), Remote) for arg in args):
            if object.__getattribute__(self, "_base"):
                return getattr(_content(self), name)(*args)
            if name == "__contains__":
                return any(item is args[0] or item == args[0] for item in iter(self))
            return NotImplemented
        return _ask(self, "special", self, name, args)

    return method


class Peer:
    """One end of the connection. `guards`: this one runs the tests, and grants the other no more than it
    needs.
    """

    def __init__(self, reads: int, writes: int, *, guards: bool) -> None:
        self._reads, self._writes, self.guards = reads, writes, guards
        self.exported: list[Any] = []
        self.named: set[int] = set()
        self.names: dict[str, Any] = {}
        self.printed: Printed | None = None
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._kinds: dict[tuple[Any, ...], type] = {}
        self._lock = _thread.RLock()

    def ask(self, action: str, *args: Any) -> Any:
        with self._lock:
            containers = self._send(b"?", (action, args), [])
            while True:
                kind, reader = self._receive(containers)
                if kind == b"?":
                    self._answer(reader)
                    continue
                return self._conclude(kind, reader, containers)

    def serve(self) -> None:
        """Answer until the other end is gone."""
        while True:
            kind, reader = self._receive([])
            if kind != b"?":
                raise Lost
            self._answer(reader)

    def _conclude(self, kind: bytes, reader: _ValueReader, containers: list[Any]) -> Any:
        try:
            result, printed = reader.read(), reader.read()
            contents = [reader.read() for _ in containers]
            for container, content in zip(containers, contents, strict=True):
                fill(container, content)
        except (ValueError, TypeError, LookupError, ArithmeticError, UnicodeError) as error:
            raise Lost from error
        if printed:
            sys.stdout.write(str(printed))
        if kind == b"!":
            raise result if isinstance(result, BaseException) else Lost
        return result

    def _answer(self, reader: _ValueReader) -> None:
        try:
            action, args = reader.read()
            serve = getattr(self, f"_on_{action}")
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise Lost from error
        containers, kind = reader.containers, b"="
        try:
            result = serve(*args)
        except (Lost, NotSupported):
            raise
        except BaseException as error:
            kind, result = b"!", error
        try:
            self._send(kind, result, containers, reply=True)
        except (TypeError, ValueError, RecursionError) as error:
            self._send(b"!", TypeError(str(error)), containers, reply=True)

    def _send(self, kind: bytes, value: Any, containers: list[Any], *, reply: bool = False) -> list[Any]:
        writer = _Writer(self, containers)
        writer.write(value)
        if reply:
            writer.write(self.printed.take() if self.printed is not None else "")
            for container in containers:
                writer.write_content(container)
        message = memoryview(kind + _LENGTH.pack(len(writer.out)) + bytes(writer.out))
        try:
            while message:
                message = message[os.write(self._writes, message) :]
        except OSError as error:
            raise Lost from error
        return writer.containers

    def _receive(self, containers: list[Any]) -> tuple[bytes, _ValueReader]:
        head = self._take(1 + _LENGTH.size)
        length = _LENGTH.unpack(head[1:])[0]
        if length > _MOST_BYTES or head[:1] not in (b"?", b"=", b"!"):
            raise Lost
        return head[:1], _ValueReader(self, self._take(length), containers if head[:1] != b"?" else [])

    def _take(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                piece = os.read(self._reads, min(count - len(parts), 2**20))
            except OSError as error:
                raise Lost from error
            if not piece:
                raise Lost
            parts += piece
        return bytes(parts)

    def export(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return number

    def builtin(self, name: str) -> Any:
        value = vars(builtins)[name]
        allowed = value in _COPIED_TYPES or (isinstance(value, type) and issubclass(value, BaseException))
        if self.guards and not allowed and not isinstance(value, type):
            raise ValueError("not for the tests")
        return value

    def module(self, name: str) -> Any:
        if self.guards:
            raise ValueError("not for the tests")
        __import__(name)
        return sys.modules[name]

    def exception_class(self, number: int, name: str, bases: tuple[Any, ...]) -> type:
        if number not in self._proxies:
            above = tuple(b for b in bases if isinstance(b, type) and issubclass(b, BaseException))
            namespace = {
                "_remote_number": number,
                "__str__": lambda error: vars(error).get("_remote_text", ""),
            }
            self._proxies[number] = type(str(name), above or (Exception,), namespace)
        proxy: type = self._proxies[number]
        return proxy

    def proxy(self, tag: bytes, number: int, name: str, base: str, mask: int, classes: Any) -> Any:
        if number not in self._proxies:
            proxy: Any = object.__new__(self._kind(str(name), str(base), int(mask)))
            for key, value in (("_peer", self), ("_number", number), ("_base", base), ("_classes", classes)):
                object.__setattr__(proxy, key, value)
            self._proxies[number] = proxy
        proxy_class = self._proxies[number]
        return self._wait(proxy_class) if tag == b"w" else proxy_class

    async def _wait(self, coroutine: Any) -> Any:
        return self.ask("await", coroutine)

    def _kind(self, name: str, base: str, mask: int) -> type:
        key = (name, base, mask)
        if key not in self._kinds:
            if base and (base not in vars(builtins) or vars(builtins)[base] not in _PLAIN):
                raise ValueError("no such base")
            inner: dict[str, Any] = {"__slots__": ()}
            for bit, special in enumerate(_SPECIALS):
                if mask >> bit & 1 and special not in vars(Remote):
                    inner[special] = _forward(special)
            if base:
                inner["__class__"] = property(lambda _self: vars(builtins)[base])
            self._kinds[key] = type(name, (Remote,), inner)
        return self._kinds[key]

    def lookup(self, name: str) -> Any:
        """A name of the answer; its classes are treated as if the tests named them."""
        value = self.ask("global", name)
        if issubclass(type(value), Remote):
            self.named.add(object.__getattribute__(value, "_number"))
        return value

    # What the other end may ask for.

    def _on_names(self) -> tuple[str, ...]:
        return tuple(self.names)

    def _on_call(self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return function(*args, **keywords)

    def _on_special(self, value: Any, name: str, args: tuple[Any, ...]) -> Any:
        if name not in _SPECIALS:
            raise AttributeError(name)
        method = _special(type(value), name)
        return getattr(type(value), name)(value, *args) if method is not None else NotImplemented

    def _on_bool(self, value: Any) -> bool:
        return bool(value)

    def _on_getattr(self, value: Any, name: str) -> Any:
        if self.guards and (name.startswith(_HIDDEN) or isinstance(value, type | types.FunctionType)):
            raise AttributeError(name)
        return getattr(value, name)

    def _on_setattr(self, value: Any, name: str, item: Any) -> None:
        if self.guards:
            raise AttributeError(name)
        setattr(value, name, item)

    def _on_delattr(self, value: Any, name: str) -> None:
        if self.guards:
            raise AttributeError(name)
        delattr(value, name)

    def _on_isinstance(self, value: Any, kind: Any) -> bool:
        return isinstance(value, kind)

    def _on_issubclass(self, value: Any, kind: Any) -> bool:
        return issubclass(value, kind)

    def _on_content(self, value: Any) -> Any:
        base: Any = next(base for base in type(value).__mro__ if base in _PLAIN)
        if base is dict:
            return dict(dict.items(value))
        if base in (int, float, complex, bytes, bytearray):
            return base(base.__add__(value, base()))
        return str.__str__(value) if base is str else base(base.__iter__(value))

    def _on_input(self, prompt: str) -> str:
        return str(builtins.input(prompt)) if self.guards else ""

    def _on_global(self, name: str) -> Any:
        if self.guards or name not in self.names:
            raise KeyError(name)
        return self.names[name]

    def _on_set_global(self, name: str, value: Any) -> None:
        if self.guards:
            raise KeyError(name)
        self.names[name] = value

    def _on_del_global(self, name: str) -> None:
        if self.guards:
            raise KeyError(name)
        del self.names[name]

    def _on_await(self, coroutine: Any) -> Any:
        if self.guards:
            raise TypeError("not for the answer")
        import asyncio

        return asyncio.run(coroutine)


class Printed(io.BytesIO):
    """Output of the answer, sent along with the next reply; floods are passed on, where they are counted."""

    def write(self, piece: Any) -> int:
        count = super().write(piece)
        if self.tell() > _KEPT_OUTPUT:
            os.write(1, self.getvalue())
            self.seek(0)
            self.truncate()
        return count

    def take(self) -> str:
        text = self.getvalue().decode("utf-8", "replace")
        self.seek(0)
        self.truncate()
        return text


class AnswerNames(dict["str", "Any"]):
    """The globals of the tests: names that they do not define are looked up in the answer."""

    def __init__(self, peer: Peer, names: frozenset[str]) -> None:
        super().__init__(__name__="answer", __builtins__=builtins)
        self._peer, self._names = peer, names

    def __missing__(self, name: str) -> Any:
        if name in self._names or not hasattr(builtins, name):
            return self._peer.lookup(name)
        raise KeyError(name)


class AnswerModule(types.ModuleType):
    """For tests that import the answer."""

    def __init__(self, peer: Peer, names: frozenset[str]) -> None:
        super().__init__("answer")
        vars(self).update(_peer=peer, __all__=sorted(name for name in names if not name.startswith("_")))

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_peer"].lookup(name)
        except KeyError:
            raise AttributeError(f"the answer has no {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_peer"].ask("set_global", name, value)

    def __delattr__(self, name: str) -> None:
        vars(self)["_peer"].ask("del_global", name)
