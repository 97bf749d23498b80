"""Many programs in one sandbox: each in order, with its own limits, apart from all others."""

import json
import os

import pytest
from sandbox_kinds import require_way

from graftwork.process.sandbox import Limits, Sandbox, SandboxKind
from graftwork.process.sandbox.run import WAYS, BatchJob, Prelude, can_share, run_batch

PRELUDE = Prelude("harness", "import json\n\ndef show(value):\n    print(json.dumps(value))\n", ("json",))
PATIENT = Limits(wall_seconds=120, cpu_seconds=120)
SECRET = "the solution of another answer"


def run(kind, *sources, limits=PATIENT):
    jobs = [BatchJob(source, (("own.txt", str(place)),)) for place, source in enumerate(sources)]
    return run_batch(jobs, sandbox=Sandbox(require_way(kind), limits), prelude=PRELUDE, at_once=1)


def shared(kind):
    if not can_share(Sandbox(require_way(kind))):
        pytest.skip("no way to shut code in works here that runs several programs in one sandbox")
    return kind


@pytest.mark.parametrize("kind", WAYS, ids=str)
def test_results_come_in_order_with_the_files_and_the_prelude_of_each(kind):
    show = "import harness\nharness.show([{0}, open('own.txt').read()])\n"
    results = run(kind, *(show.format(place) for place in range(5)))
    assert [json.loads(result.stdout) for result in results] == [[place, str(place)] for place in range(5)]
    assert all(result.ok for result in results)


@pytest.mark.parametrize("kind", WAYS, ids=str)
def test_a_private_umask_outside_changes_nothing_inside(kind):
    before = os.umask(0o077)
    try:
        results = run(
            kind, "import decimal\nprint(open('own.txt').read())", "import harness\nharness.show(1)"
        )
    finally:
        os.umask(before)
    assert [result.stdout for result in results] == ["0\n", "1\n"]


@pytest.mark.parametrize("kind", [SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES], ids=str)
def test_a_program_finds_neither_files_nor_processes_nor_code_of_others(kind):
    leave = (
        f"MARK = {SECRET!r}\nimport os, time\n"
        "open('/box/left', 'w').write(MARK)\n"
        "if os.fork() == 0:\n    time.sleep(600)\n"
    )
    look = (
        "import gc, os, harness\n"
        f"parts = {SECRET.split()!r}\n"
        "seen = [o for o in gc.get_objects() if type(o) is dict and 'MARK' in o]\n"
        "alive = []\n"
        "for number in range(2, 200):\n"
        "    try:\n        os.kill(number, 0)\n        alive.append(number)\n"
        "    except PermissionError:\n        alive.append(-number)\n"
        "    except ProcessLookupError:\n        pass\n"
        "alive = [n for n in alive if abs(n) != os.getpid()]\n"
        "opened = []\n"
        "for number in range(3, 64):\n"
        "    try:\n        os.fstat(number)\n        opened.append(number)\n"
        "    except OSError:\n        pass\n"
        "harness.show([os.listdir('/box'), len(seen), alive, opened])\n"
    )
    later = f"MARK = {SECRET!r}\n"
    _, found, _ = run(shared(kind), leave, look, later)
    assert json.loads(found.stdout) == [["1"], 0, [], []]


@pytest.mark.parametrize("kind", [SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES], ids=str)
def test_a_program_at_a_limit_costs_the_others_nothing(kind):
    fine = "print('fine')\n"
    for seconds in (1, 8, 60):  # the longer ones where the machine is so slow that the others were late too
        results = run(
            shared(kind),
            fine,
            "import time\ntime.sleep(600)\n",
            "print('x' * 100_000)\n",
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "import os\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass\n",
            fine,
            limits=Limits(wall_seconds=seconds, cpu_seconds=seconds, output_bytes=4096),
        )
        reasons = [result.reason for result in results]
        if reasons.count("wall_clock") == 1:
            break
    assert reasons == ["", "wall_clock", "output", "signal", "", ""]
    assert results[-1].stdout == "fine\n"


@pytest.mark.parametrize("kind", [SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES], ids=str)
def test_programs_that_a_dying_sandbox_took_along_run_again_alone(kind):
    """Memory of all processes together ends the whole sandbox from outside."""
    greedy = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(40 << 20)\n"
        "        time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    limits = PATIENT.model_copy(update={"memory_bytes": 128 << 20})
    before, ended, behind = run(shared(kind), "print(1)\n", greedy, "print(3)\n", limits=limits)
    assert (before.stdout, behind.stdout) == ("1\n", "3\n")
    assert ended.reason == "memory"
