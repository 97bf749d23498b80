"""Bombs and floods against the sandbox, on every mechanism that works on this machine.

The escapes and the limits of one run are in tests/unit/process/test_sandbox_*.py. Here: what an attacker can
make grow outside the limits of a process, in the grader or in the kernel.
"""

import os
import secrets
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from measured import SOURCE, each, measure

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "process"))
from sandbox_kinds import PATIENT, each_way, require_way, run_in

from graftwork.process.sandbox import Sandbox, SandboxKind
from graftwork.process.sandbox.run import WAYS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
each_way_and_off = pytest.mark.parametrize("kind", [*WAYS, SandboxKind.OFF], ids=str)
FEW_FILES = PATIENT.model_copy(update={"files": 1000})
WITHOUT_FILE_SYSTEM = (SandboxKind.LANDLOCK, SandboxKind.OFF)
FIND_CHANNEL = """
import fcntl, os, struct
def is_written(number):
    try:
        return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError:
        return False
channel = next(n for n in range(3, 64) if is_written(n))
def framed(message):
    return struct.pack("!I", len(message)) + message
"""
FLOODS = {
    "of answers that are never read": "while True: os.write(channel, framed(b'ready') * 400)",
    "of the longest messages": "while True: os.write(channel, framed(b'x' * 256) * 16)",
    "of empty messages": "while True: os.write(channel, framed(b'') * 1024)",
    "from many processes": "[os.fork() for _ in range(2)]\nwhile True: os.write(channel, framed(b'') * 1024)",
}


def works(kind: SandboxKind) -> SandboxKind:
    return kind if kind is SandboxKind.OFF else require_way(kind)


@each_way_and_off
@each(FLOODS, quick=("of answers that are never read",))
def test_a_flood_of_messages_ends_the_run_and_does_not_grow_the_grader(kind, name):
    # They reach the process of the tests alone, which leaves at the first that is not of the form.
    measured = measure(
        f"""
        sandbox = Sandbox(SandboxKind({str(works(kind))!r}), Limits(wall_seconds=60))
        result = sandbox.test({FIND_CHANNEL + FLOODS[name]!r}, "pass")
        print(result.ok, result.reason)
        """,
        prepare="from graftwork.process.sandbox import *",
    )
    assert measured.output.startswith("False "), measured
    assert "wall_clock" not in measured.output, measured
    assert measured.grown < 8, measured


MANY = {
    "files": "open(str(n), 'x').close()",
    "folders": "os.mkdir(str(n))",
    "symbolic links": "os.symlink('x', str(n))",
    "hard links": "os.link('first', str(n))",
}


@each_way
@each(MANY, quick=("files",))
def test_the_number_of_files_is_bounded(kind, name):
    source = f"""
        import os
        open("first", "x").close()
        n = 0
        try:
            while True:
                {MANY[name]}
                n += 1
        except OSError:
            print(n)
    """
    result = run_in(kind, textwrap.dedent(source), limits=FEW_FILES)
    if kind in WITHOUT_FILE_SYSTEM:
        assert result.reason == "disk", result
    else:
        assert 100 < int(result.stdout) <= FEW_FILES.files, result


@pytest.mark.slow
@each_way_and_off
def test_a_tree_deeper_than_any_path_hides_no_files(kind):
    source = """
        import os
        n = 0
        try:
            while True:
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
                n += 1
        except OSError:
            print(n)
    """
    limits = PATIENT.model_copy(update={"files": 100_000, "cpu_seconds": 20})
    if kind not in WITHOUT_FILE_SYSTEM:
        limits = FEW_FILES
    result = Sandbox(works(kind), limits).run(textwrap.dedent(source))
    assert result.reason == "disk" if kind in WITHOUT_FILE_SYSTEM else int(result.stdout) <= limits.files


@pytest.mark.parametrize("kind", WITHOUT_FILE_SYSTEM, ids=str)
@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted while open"])
def test_all_files_together_are_bounded_without_a_file_system_of_their_own(kind, deleted):
    source = f"""
        import os, time
        held = []
        for number in range(40):
            held.append(open(str(number), "wb", buffering=0))
            held[-1].write(bytes(1 << 20))
            if {deleted}:
                os.unlink(str(number))
        print("written", flush=True)
        time.sleep(60)
    """
    result = Sandbox(works(kind), PATIENT).run(textwrap.dedent(source))
    assert result.reason == "disk", result
    assert result.seconds < PATIENT.wall_seconds


@pytest.mark.parametrize("kind", WITHOUT_FILE_SYSTEM, ids=str)
def test_a_run_that_stays_within_its_files_is_not_ended(kind):
    source = """
        import os
        for number in range(500):
            with open(str(number), "w") as file:
                file.write("x")
        os.symlink("/usr", "outside")
        print(len(os.listdir()))
    """
    result = Sandbox(works(kind), FEW_FILES).run(textwrap.dedent(source))
    assert result.stdout == "501\n", result


@each_way
def test_a_socket_pair_reaches_nobody_but_its_other_end(kind, tmp_path):
    name = f"\0graft-{secrets.token_hex(6)}"
    door = tmp_path / "door"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hidden,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as seen,
    ):
        hidden.bind(name)
        seen.bind(str(door))
        tmp_path.chmod(0o777)
        door.chmod(0o777)
        source = f"""
            import socket
            def attempt(what):
                try:
                    print("GOT", what())
                except OSError as error:
                    print("refused")
            def pair(kind):
                return socket.socketpair(socket.AF_UNIX, kind)[0]
            for address in ({name!r}, {str(door)!r}):
                for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                    attempt(lambda: pair(kind).sendto(b"out", address))
                    attempt(lambda: pair(kind).connect(address))
            attempt(lambda: pair(socket.SOCK_STREAM).bind("\\0mine"))
            attempt(lambda: pair(socket.SOCK_STREAM).listen())
            attempt(lambda: socket.socketpair(40))
        """
        result = run_in(kind, textwrap.dedent(source))
        assert result.stdout == "refused\n" * 15, result
        for receiver in (hidden, seen):
            with pytest.raises(BlockingIOError):
                receiver.recv(16, socket.MSG_DONTWAIT)


@each_way
def test_programs_that_need_a_socket_pair_run(kind):
    source = """
        import asyncio
        async def main():
            await asyncio.sleep(0)
            return await asyncio.to_thread(lambda: "awaited")
        print(asyncio.run(main()))
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "awaited\n"


@each_way
def test_the_buffers_of_socket_pairs_cannot_be_enlarged(kind):
    """They are memory of the kernel: at 4 MiB each, eight processes held 3 GB of it."""
    source = """
        import socket
        end = socket.socketpair()[0]
        before = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
            try:
                end.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
            except OSError:
                print("refused")
        print(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before)
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "refused\n" * 4 + "True\n"


@each_way
def test_the_host_name_is_not_visible(kind):
    if kind is SandboxKind.LANDLOCK:
        pytest.skip("landlock has no host name space; docs/sandbox.md says so")
    result = run_in(kind, "import os, socket; print(os.uname().nodename, socket.gethostname())")
    assert result.stdout == "box box\n"
    assert socket.gethostname() != "box"


@each_way
def test_the_box_cannot_be_remounted_larger(kind):
    source = """
        import ctypes
        library = ctypes.CDLL(None, use_errno=True)
        print(library.mount(b"tmpfs", b"/box", None, 32, b"nr_inodes=0,size=1g"), ctypes.get_errno())
        held = (ctypes.c_uint32 * 6)()
        print(library.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held))
        print(any(part >> 21 & 1 for part in held[:3]))  # CAP_SYS_ADMIN
    """
    assert run_in(kind, textwrap.dedent(source)).stdout == "-1 1\n0\nFalse\n"


@each_way_and_off
def test_a_user_namespace_with_a_single_user_gives_a_box_or_a_clear_error(kind):
    """Rootless containers map one user: changing to another one fails there."""
    source = f"""
        from graftwork.process.sandbox import *
        from graftwork.records.errors import EnvironmentFailure
        import os
        assert os.geteuid() == 0
        kind = SandboxKind({str(kind)!r})
        try:
            print("ran", Sandbox(kind, Limits(wall_seconds=60)).run("print('inside')").stdout)
        except EnvironmentFailure as error:
            print("refused", error.what)
        print(repr(why_not(kind)))
    """
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    if "unshare" in done.stderr and done.returncode == 1 and not done.stdout:
        pytest.skip(f"no user namespace can be made here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    if kind in (SandboxKind.NAMESPACES, SandboxKind.LANDLOCK):
        assert "cannot run as a separate user" in done.stdout
    if kind is SandboxKind.OFF:
        assert done.stdout.startswith("ran inside")
