"""Code that tries to get out. Every attempt first shows that it ran, so that none passes by not trying."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from sandbox_kinds import NAME_ITSELF, PATIENT, comes_true, each_way, nobody_is_named, processes_named, run_in

from graftwork.process.sandbox import Limits, Sandbox, SandboxKind, why_not
from graftwork.process.sandbox.run import WAYS

ATTEMPT = """
import sys
def attempt(what):
    try:
        print("GOT", what(), flush=True)
    except BaseException as error:
        print("refused", type(error).__name__, flush=True)
"""


def try_all(kind, attempts: list[str], *, prelude: str = "", limits: Limits = PATIENT):
    source = ATTEMPT + prelude + "\n" + "\n".join(f"attempt(lambda: {attempt})" for attempt in attempts)
    result = run_in(kind, source, limits=limits)
    assert result.stdout.count("GOT") + result.stdout.count("refused") == len(attempts), result
    return result


@pytest.fixture
def secret():
    return f"secret-{secrets.token_hex(8)}"


@pytest.fixture
def secret_at_home(secret):
    path = Path.home() / f".graft-test-{secrets.token_hex(6)}"
    path.write_text(secret)
    yield path
    path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_root_and_users_with_user_namespaces_can_isolate_code():
    by_namespaces = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False)
    if os.geteuid() != 0 and by_namespaces.returncode != 0:
        pytest.skip("neither root nor user namespaces on this machine: generated code is refused here")
    lacking = {str(kind): why_not(kind) for kind in WAYS}
    assert not all(lacking.values()), f"NO WAY TO SHUT CODE IN WORKS ON THIS MACHINE: {lacking}"


@each_way
def test_files_outside_cannot_be_read(kind, secret, secret_at_home, tmp_path):
    in_project = tmp_path / "graft.yaml"
    in_project.write_text(secret)
    tmp_path.chmod(0o755)
    in_project.chmod(0o644)
    places = [str(secret_at_home), str(in_project), f"../../../../../..{in_project}", "/etc/shadow"]
    places += [f"/proc/self/root{in_project}", f"/proc/1/root{in_project}", f"/proc/{os.getpid()}/environ"]
    attempts = [f"open({place!r}, 'rb').read()" for place in places]
    attempts += ["(os.symlink('/', 'up'), open('up' + " + repr(str(in_project)) + ").read())[1]"]
    attempts += [f"os.listdir({str(folder)!r})" for folder in (tmp_path, "/proc", "/etc/ssl")]
    attempts += ["os.link(" + repr(str(in_project)) + ", 'mine')", "open('/dev/mem', 'rb').read(1)"]
    # Where the interpreter lies in it, the home may be there; then it holds nothing but the way to it.
    look_at_home = f"try: print(os.listdir({str(Path.home())!r}))\nexcept OSError: pass\n"
    result = try_all(kind, attempts, prelude="import os\n" + look_at_home)
    assert secret_at_home.name not in result.stdout
    assert secret not in result.stdout + result.stderr
    assert "GOT" not in result.stdout, result.stdout


@each_way
def test_nothing_outside_can_be_written(kind, tmp_path):
    target = tmp_path / "target"
    target.write_text("before")
    tmp_path.chmod(0o777)
    target.chmod(0o666)
    attempts = [
        f"open({str(target)!r}, 'w').write('after')",
        f"open({str(tmp_path / 'new')!r}, 'w').write('after')",
        f"os.unlink({str(target)!r})",
        f"os.rename({str(target)!r}, {str(tmp_path / 'gone')!r})",
        "open(os.__file__, 'a').write('x')",
        "open('/usr/lib/x', 'w').write('x')",
        "open('/x', 'w').write('x')",
        "os.mkdir('/y')",
        "os.chmod(os.__file__, 0o777)",
    ]
    result = try_all(kind, attempts, prelude="import os")
    assert "GOT" not in result.stdout, result.stdout
    assert target.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


@each_way
def test_no_network_of_any_kind_is_there(kind, tmp_path):
    name = f"\0graft-{secrets.token_hex(6)}"
    path = str(tmp_path / "door")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind(name)
        hidden.listen()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            tmp_path.chmod(0o777)
            Path(path).chmod(0o777)
            port = listener.getsockname()[1]
            # From out here each of these would get through.
            for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name)):
                with socket.socket(family) as probe:
                    probe.connect(address)
            attempts = [
                f"socket.create_connection(('127.0.0.1', {port}), 1)",
                f"socket.socket(socket.AF_UNIX).connect({name!r})",
                f"socket.socket(socket.AF_UNIX).connect({path!r})",
                "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
                "socket.socket(40, socket.SOCK_STREAM).connect((2, 1))",
                "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
                "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
                "socket.getaddrinfo('example.com', 80)",
                "socket.create_server(('127.0.0.1', 0))",
            ]
            result = try_all(kind, attempts, prelude="import socket")
    assert "GOT" not in result.stdout, result.stdout


@each_way
def test_no_variable_of_ours_reaches_the_code(kind, secret, monkeypatch):
    monkeypatch.setenv("GRAFT_TEST_API_KEY", secret)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{secret}@proxy")
    source = "import os; print(sorted(os.environ)); print(dict(os.environ))"
    result = run_in(kind, source)
    assert result.ok
    assert secret not in result.stdout
    assert "GRAFT_TEST_API_KEY" not in result.stdout


@each_way
def test_no_file_that_we_have_open_reaches_the_code(kind, secret, tmp_path):
    path = tmp_path / "open"
    path.write_text(secret)
    number = os.open(path, os.O_RDONLY)
    try:
        os.set_inheritable(number, True)
        source = """
            import os
            held = []
            for number in range(64):
                try:
                    os.fstat(number)
                    held.append(number)
                except OSError:
                    pass
            print(held, [os.read(number, 99) for number in held if number not in (1, 2)])
        """
        result = run_in(kind, textwrap.dedent(source))
    finally:
        os.close(number)
    assert result.stdout == "[0, 1, 2] [b'']\n", result


@each_way
def test_other_processes_can_neither_be_signalled_nor_read(kind):
    ended = subprocess.Popen(["sleep", "600"])
    try:
        attempts = [
            f"os.kill({os.getpid()}, 0)",
            f"os.kill({ended.pid}, 9)",
            "os.kill(os.getppid(), 9)",
            "os.killpg(os.getpgid(os.getppid()), 9)",
            f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
            "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
            f"library.ptrace(16, {os.getpid()}, 0, 0) == 0 or 1 / 0",
            "library.ptrace(16, os.getppid(), 0, 0) == 0 or 1 / 0",
        ]
        source = "import os, ctypes; library = ctypes.CDLL(None)"
        result = try_all(kind, attempts, prelude=source)
        assert ended.poll() is None
    finally:
        ended.kill()
        ended.wait()
    # Of its own first process it may be notified that the signal was sent: that one does not take it.
    allowed = 1 if kind is SandboxKind.BUBBLEWRAP or kind is SandboxKind.USER_NAMESPACES else 0
    assert result.stdout.count("GOT") <= allowed, result.stdout
    assert result.ok


@each_way
def test_signals_to_everybody_reach_nobody_else(kind):
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        source = """
            import os, signal
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                for target in (-1, 1, os.getppid()):
                    try:
                        os.kill(target, number)
                    except OSError:
                        pass
            print("still here")
        """
        result = run_in(kind, textwrap.dedent(source))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert result.stdout == "still here\n", result


@each_way
def test_no_right_can_be_had_again(kind):
    attempts = [
        "os.setuid(0)",
        "os.setgid(0)",
        "os.setgroups([0])",
        "os.chroot('/')",
        "library.unshare(0x10000000) == 0 or 1 / 0",
        "library.mount(b'x', b'/box', b'tmpfs', 0, None) == 0 or 1 / 0",
        "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "os.mknod('device', 0o60666, os.makedev(254, 0)) or open('device', 'rb').read(1)",
    ]
    result = try_all(kind, attempts, prelude="import os, ctypes, resource; library = ctypes.CDLL(None)")
    assert "GOT" not in result.stdout, result.stdout


@each_way
def test_links_that_the_code_leaves_behind_lead_nowhere(kind, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    source = f"""
        import os
        os.symlink({str(kept)!r}, "folder")
        os.symlink({str(kept / "file")!r}, "output.txt")
        os.symlink("/etc/passwd", "stdout")
        os.symlink("loop", "loop")
        os.mkdir("shut"); open("shut/inner", "w").close(); os.chmod("shut", 0)
        print(len(os.listdir(".")))
    """
    result = run_in(kind, textwrap.dedent(source))
    assert result.stdout == "5\n", result
    assert (kept / "file").read_text() == "mine"


@each_way
def test_a_daemon_does_not_outlive_its_run(kind):
    name = f"d{secrets.token_hex(6)}"
    source = f"""
        import os, signal, time
        ready, report = os.pipe()
        if os.fork() == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if os.fork() == 0:
                {NAME_ITSELF.format(name=name).strip()}
                os.write(report, b"x")
                for number in range(64):
                    try:
                        os.close(number)
                    except OSError:
                        pass
                time.sleep(300)
            os._exit(0)
        os.read(ready, 1)
        print("left one behind", flush=True)
    """
    result = run_in(kind, textwrap.dedent(source))
    assert result.stdout == "left one behind\n", result
    assert result.ok
    assert nobody_is_named(name)


@each_way
def test_the_sandbox_ends_with_its_parent(kind):
    run_in(kind, "pass")
    name = f"e{secrets.token_hex(6)}"
    inner = NAME_ITSELF.format(name=name) + "import os; os.fork()\nimport time; time.sleep(300)"
    source = (
        "from graftwork.process.sandbox import *\n"
        f"Sandbox(SandboxKind({str(kind)!r}), Limits(wall_seconds=300)).run({inner!r})"
    )
    starter = subprocess.Popen([sys.executable, "-c", source])
    try:
        seen = threading.Event()
        for _ in range(100_000):
            if len(processes_named(name)) == 2:
                seen.set()
                break
        assert seen.is_set(), "the box was never seen: this test would prove nothing"
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert nobody_is_named(name)
    left = Path(tempfile.gettempdir())
    assert comes_true(lambda: not list(left.glob(f"graft-box-{starter.pid}-*")))


def test_files_get_into_the_box_only_below_its_own_folder():
    from graftwork.records.errors import UserError

    kind = next((way for way in WAYS if not why_not(way)), None)
    if kind is None:
        pytest.skip("no way to shut code in works here")
    for name in ("../x", "/x", "a/../../x", "", "a\0b"):
        with pytest.raises(UserError):
            Sandbox(kind).run("pass", files={name: "text"})
    source = "import helper; print(helper.word, open('data/words.txt').read())"
    result = Sandbox(kind, PATIENT).run(source, files={"helper.py": "word = 'é'", "data/words.txt": "ü\r\n"})
    assert result.stdout == "é ü\n\n", result
