"""The parts of the sandbox by themselves: what is seen, what is refused, what is said."""

import contextlib
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_kinds import MIB, NAME_ITSELF, nobody_is_named, run_until_late

from graftwork.process.sandbox import Limits, Sandbox, SandboxKind, SandboxSettings, available, open_sandbox
from graftwork.process.sandbox.command import choose_uid, list_views, scrubbed_environment
from graftwork.process.sandbox.inside import walls as call_filter
from graftwork.process.sandbox.inside.remote import Lost, Peer
from graftwork.process.sandbox.run import Talk, follow, frame, memory_of_tree
from graftwork.records.errors import EnvironmentFailure

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def test_nothing_is_shown_of_home_project_or_settings():
    seen = [Path(view.source) for view in list_views() if view.kind in ("folder", "file")]
    for private in (Path.home(), Path.cwd(), Path("/etc"), Path("/var"), Path("/proc"), Path("/home")):
        assert not any(private == path or private.is_relative_to(path) for path in seen), private
    assert not any(path.name in ("site-packages", "dist-packages") for path in seen)


def test_packages_are_shown_only_where_they_are_named(tmp_path):
    assert not any(view.source == str(tmp_path) for view in list_views())
    assert any(view == ("folder", str(tmp_path), "/packages/0") for view in list_views((str(tmp_path),)))


@pytest.mark.parametrize(("seconds", "cpu"), [(0.2, 1), (30.0, 30)])
def test_limits_are_those_of_the_settings(seconds, cpu):
    settings = SandboxSettings(seconds=seconds, memory_mib=100)
    assert settings.limits == Limits(wall_seconds=seconds, cpu_seconds=cpu, memory_bytes=100 * MIB)
    assert SandboxSettings().limits == Limits()


@LINUX
def test_named_packages_can_be_imported_and_not_changed(tmp_path):
    (tmp_path / "extra.py").write_text("word = 'found'")
    tmp_path.chmod(0o755)
    source = f"import extra\nprint(extra.word)\nopen({str(tmp_path / 'new')!r}, 'w')"
    result = Sandbox(_some_way(), Limits(), (str(tmp_path),)).run(source)
    assert result.stdout == "found\n"
    assert not (tmp_path / "new").exists()


def test_the_environment_is_built_from_scratch_and_not_filtered(monkeypatch):
    monkeypatch.setenv("PATH", "/secret")
    monkeypatch.setenv("HOME", "/secret")
    assert "/secret" not in str(scrubbed_environment("/box"))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("socket", 0, "refuse"),
        ("connect", 0, "refuse"),
        ("socketpair", (1, 1), "allow"),
        ("socketpair", (1, 0x80801), "allow"),
        ("socketpair", (1, 2), "refuse"),
        ("socketpair", (1, 0x80005), "refuse"),
        ("socketpair", (40, 1), "refuse"),
        ("ptrace", 0, "refuse"),
        ("clone", 0x10000000, "refuse"),
        ("clone", 0x11, "allow"),
        ("read", 0, "allow"),
        ("exit_group", 0, "allow"),
        ("kexec_load", 0, "refuse"),
    ],
)
def test_the_filter_decides_call_by_call(machine, call, arguments, verdict):
    column = ["x86_64", "aarch64"].index(machine)
    others = {"clone": (56, 220), "read": (0, 63), "exit_group": (231, 94), "socketpair": (53, 199)}
    number = (others | call_filter.REFUSED)[call][column]
    architecture = (0xC000003E, 0xC00000B7)[column]
    decided = _interpret(call_filter.build_filter(machine), number, architecture, arguments)
    assert decided == {"allow": 0x7FFF0000, "refuse": 0x00050001}[verdict]


def test_calls_of_another_architecture_are_deadly():
    program = call_filter.build_filter("x86_64")
    assert _interpret(program, 0, 0x40000003, 0) == 0x80000000
    assert _interpret(program, 0x40000000, 0xC000003E, 0) == 0x00050000 | 38
    assert call_filter.build_filter("pdp11") is None


@LINUX
def test_every_run_as_root_has_a_user_of_its_own():
    if os.geteuid() != 0:
        assert choose_uid() is None
    else:
        assert len({choose_uid() for _ in range(20)}) > 10
        assert all(uid >= 60_000 for uid in (choose_uid() for _ in range(20)))


@LINUX
def test_memory_of_a_tree_counts_shared_pages_once():
    source = """
        import os, sys
        held = bytearray(os.urandom(1 << 20)) * 64
        for _ in range(5):
            if os.fork() == 0:
                sys.stdin.read()
                os._exit(0)
        print("ready", flush=True)
        sys.stdin.read()
    """
    tree = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", textwrap.dedent(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        tree.stdout.readline()
        quick = memory_of_tree(tree.pid, most=2**60)
        exact = memory_of_tree(tree.pid, most=0)
    finally:
        tree.communicate(b"")
    assert quick > 256 * MIB
    assert 48 * MIB < exact < quick / 2


def test_a_process_that_has_ended_uses_nothing():
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    assert memory_of_tree(ended.pid, most=0) == 0


@given(st.binary(max_size=600))
def test_whatever_the_far_side_sends_nobody_is_kept_waiting(sent):
    heard = []
    near, far = socket.socketpair()
    ended, other = os.pipe()
    with near, far:
        far.sendall(sent)
        far.shutdown(socket.SHUT_WR)
        os.close(other)
        talk = Talk(near, heard.append, outgoing=bytearray(frame(b"task")))
        limits = Limits(output_bytes=9, memory_bytes=2**60)
        follow(talk, os.getpid(), pipes={"status": ended}, deadline=2**40, limits=limits)
    os.close(ended)
    assert talk.reason in ("", "messages")
    assert len(heard) <= 8
    assert all(len(message) <= 256 for message in heard)


@LINUX
def test_where_no_way_works_the_code_is_refused_with_the_reasons(monkeypatch):
    module = sys.modules["graftwork.process.sandbox.run"]
    monkeypatch.setattr(module, "why_not", lambda kind, *_: f"no {kind} today")
    available.cache_clear()
    try:
        with pytest.raises(EnvironmentFailure) as refused:
            open_sandbox(SandboxSettings())
    finally:
        available.cache_clear()
    assert "no bubblewrap today" in refused.value.why
    assert "no landlock today" in refused.value.why
    assert "mode: off" in refused.value.fix
    assert open_sandbox(SandboxSettings(mode="off")).kind is SandboxKind.OFF


@LINUX
def test_off_keeps_limits_deadline_and_environment(monkeypatch):
    monkeypatch.setenv("GRAFT_TEST_API_KEY", "planted")
    name = f"o{secrets.token_hex(6)}"
    source = """
        import os, time
        print("GRAFT_TEST_API_KEY" in os.environ, flush=True)
        try:
            bytearray(1 << 30)
        except MemoryError:
            print("refused", flush=True)
        if os.fork() == 0:
            os.setsid()
            os.fork()
        time.sleep(1000)
    """

    def run(times):
        sandbox = Sandbox(SandboxKind.OFF, Limits(memory_bytes=256 * MIB, **times))
        return sandbox.run(NAME_ITSELF.format(name=name) + textwrap.dedent(source))

    result = run_until_late(run, 1.5, begun="refused")
    assert result.stdout == "False\nrefused\n"
    assert result.reason == "wall_clock"
    assert nobody_is_named(name)


@LINUX
def test_a_box_that_cannot_be_made_runs_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no permission today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(EnvironmentFailure, match="no permission today"):
        Sandbox(SandboxKind.BUBBLEWRAP).run("print(1)")


def _some_way() -> SandboxKind:
    try:
        return available()
    except EnvironmentFailure as lacking:
        pytest.skip(f"no way to shut code in works here: {lacking.why}")


def _interpret(program: bytes, number: int, architecture: int, arguments: int | tuple[int, int]) -> int:
    """The kernel's little machine, as far as the filter uses it."""
    steps = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    first, second = arguments if isinstance(arguments, tuple) else (arguments, arguments)
    data = struct.pack("=iIQ6Q", number, architecture, 0, first, second, 0, 0, 0, 0)
    held = place = 0
    while True:
        code, yes, no, value = steps[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            held &= value
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            place += yes if holds else no


@pytest.mark.parametrize(
    ("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")]
)
def test_refused_calls_have_the_numbers_of_the_kernel(column, header):
    numbers = {name: row[column] for name, row in call_filter.REFUSED.items() if row[column] is not None}
    assert len(set(numbers.values())) == len(numbers)
    file = Path("/usr/include") / header
    defined = re.findall(r"^#define __NR_(\w+) (\d+)$", file.read_text(), re.M) if file.exists() else []
    known = {name: int(number) for name, number in defined if name in numbers}
    assert known == {name: numbers[name] for name in known}


def ask_peer(action, *arguments, guards):
    """What one end of the pipe answers the other, and the names that it has then."""
    questions, replies = os.pipe(), os.pipe()
    asked = Peer(questions[0], replies[1], guards=guards)
    asked.names |= {"limit": 3}

    def serve():
        with contextlib.suppress(Lost):
            asked.serve()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        return Peer(replies[0], questions[1], guards=not guards).ask(action, *arguments), asked.names
    finally:
        os.close(questions[1])
        serving.join()
        for end in (questions[0], *replies):
            os.close(end)


class Double:
    pass


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("global", ["limit"]),
        ("set_global", ["limit", 4]),
        ("del_global", ["limit"]),
    ],
)
def test_the_answer_reads_and_changes_no_names_of_the_tests(action, arguments):
    with pytest.raises(KeyError):
        ask_peer(action, *arguments, guards=True)


def test_the_tests_read_and_change_the_names_of_the_answer():
    assert ask_peer("global", "limit", guards=False) == (3, {"limit": 3})
    assert ask_peer("set_global", "limit", 4, guards=False)[1] == {"limit": 4}
    assert ask_peer("del_global", "limit", guards=False)[1] == {}


def test_objects_of_the_tests_stay_as_they_are_and_those_of_the_answer_change():
    tests, answer = (Peer(-1, -1, guards=guards) for guards in (True, False))
    double = Double()
    double.limit = 3
    for change in (("setattr", 4), ("delattr",)):
        with pytest.raises(AttributeError):
            getattr(tests, f"_on_{change[0]}")(double, "limit", *change[1:])
        assert vars(double) == {"limit": 3}
    answer._on_setattr(double, "limit", 4)
    assert double.limit == 4
    answer._on_delattr(double, "limit")
    assert vars(double) == {}
