"""A map over pieces on a cluster: what nodes get and refuse, and what happens when it is lost."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.process.cluster import pieces as module
from graftwork.process.cluster import slurm_task
from graftwork.process.cluster.engine import MapEngine, MapWork
from graftwork.process.cluster.pieces import (
    EngineLost,
    NodeRefused,
    RemoteWork,
    code_stamp,
    pack,
    read_journals,
    require_same_code,
    unpack,
    work_on,
)
from graftwork.process.cluster.slurm_array import DONE, FAILED, ORDER, SHARED, TAKEN, TODO, put_back
from graftwork.records.errors import EnvironmentLacks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(head=JSON, blobs=st.lists(st.binary(max_size=50), max_size=4))
def test_what_is_packed_is_unpacked_the_same(head, blobs):
    assert unpack(pack(head, *blobs)) == (head, blobs)


def test_a_message_of_another_length_is_refused():
    with pytest.raises(ValueError, match="another length"):
        unpack(pack({}, b"abc") + b"d")


class StandIn:
    """Does the pieces in order, as a node would, and is lost after `most` of them."""

    name = "stand-in"

    def __init__(self, work, *, most=10**6):
        self.work, self.most, self.seen = work, most, []

    def run(self, pieces, *, entry, shared, folder):
        waiting = []
        for number, piece in enumerate(pieces):
            # Some are always on their way.
            waiting.append(piece)
            if len(waiting) < 3:
                continue
            if number >= self.most:
                raise EngineLost("the head died")
            yield self._do(waiting.pop(0))
        for piece in waiting:
            yield self._do(piece)

    def _do(self, piece):
        (number,) = unpack(piece)[0]
        self.seen.append(number)
        self.work(number)


@pytest.fixture
def squares(tmp_path):
    """Work whose result is a file, as that of the nodes."""

    def write(number):
        (tmp_path / f"{number}.txt").write_text(str(number * number))
        return number * number

    def collect(number):
        path = tmp_path / f"{number}.txt"
        return int(path.read_text()) if path.exists() else None

    here = []

    def do(number):
        here.append(number)
        return write(number)

    remote = RemoteWork("graftwork.none:none", b"", lambda number: pack([number]), collect)
    return write, MapWork(do, remote=lambda: remote), here


def test_results_come_in_the_order_of_the_pieces(squares, tmp_path):
    write, work, here = squares
    engine = MapEngine(StandIn(write), folder=tmp_path / "engine")
    assert list(engine.map(range(9), work)) == [n * n for n in range(9)]
    assert here == []
    assert list((tmp_path / "engine").iterdir()) == []


def test_a_lost_cluster_leaves_the_rest_to_this_machine_and_nothing_is_done_twice(squares, tmp_path):
    write, work, here = squares
    said = []
    runner = StandIn(write, most=5)
    engine = MapEngine(runner, folder=tmp_path / "engine", processes=1, say=said.append)
    assert list(engine.map(range(9), work)) == [n * n for n in range(9)]
    assert runner.seen + here == list(range(9))
    assert "the head died; this machine continues" in said[0]


def test_a_single_piece_does_not_wait_for_a_cluster(squares, tmp_path):
    write, work, here = squares
    runner = StandIn(write)
    assert list(MapEngine(runner, folder=tmp_path).map([3], work)) == [9]
    assert (runner.seen, here) == ([], [3])


def test_nodes_that_do_not_share_the_folder_are_noticed(squares, tmp_path):
    _, work, _ = squares
    engine = MapEngine(StandIn(lambda _number: None), folder=tmp_path / "engine")
    with pytest.raises(EnvironmentLacks, match="its file is not here"):
        list(engine.map(range(5), work))


def test_a_node_with_other_code_is_refused_by_name():
    require_same_code(code_stamp(), "n1")
    with pytest.raises(NodeRefused, match=r"the node n1 has graftwork .*, this command 0.0.9") as caught:
        require_same_code("0.0.9+abc", "n1")
    assert caught.value.where == "n1"


def prepare_shared(head, _blobs):
    return head


def note_piece(context, head, _blobs):
    if head == "bad":
        raise EnvironmentLacks("this piece is bad", why="it says so")
    (module.Path(context) / f"{head}.done").touch()


@pytest.fixture
def array(tmp_path, monkeypatch):
    """The folder of a map as the command leaves it, with three pieces."""
    monkeypatch.setattr(module.importlib, "import_module", lambda _name: __import__(__name__))
    folder = tmp_path / "map"
    for name in (TODO, TAKEN, DONE, FAILED):
        (folder / name).mkdir(parents=True)
    (folder / SHARED).write_bytes(pack(str(tmp_path)))
    order = {"entry": "graftwork.tests:note_piece", "stamp": code_stamp()}
    (folder / ORDER).write_text(json.dumps(order))
    for number, head in enumerate(("a", "b", "c")):
        (folder / TODO / f"{number:08d}").write_bytes(pack(head))
    return folder


def close_when(folder, names):
    """Close the folder as the command does once these files are there."""

    def watch():
        while not all((folder.parent / name).exists() for name in names):
            threading.Event().wait(0.01)
        (folder / "closed").touch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_task_does_all_pieces_until_the_folder_is_closed(array):
    close_when(array, ["a.done", "b.done", "c.done"])
    assert slurm_task.main(array, "0") == 0
    report = read_journals(array)
    assert (sum(report.nodes.values()), report.repeated) == (3, 0)


def test_a_task_that_was_killed_repeats_only_its_piece(array, tmp_path):
    # Begun by task 1 when its node died.
    (array / TAKEN / "1").mkdir()
    (array / TODO / "00000000").replace(array / TAKEN / "1" / "00000000")
    order = {**json.loads((array / ORDER).read_text()), "folder": str(array), "piece": "00000000"}
    work_on({**order, "node": "h1"}, (array / SHARED).read_bytes(), pack("a"))
    close_when(array, ["b.done", "c.done"])
    assert slurm_task.main(array, "0") == 0
    assert not (array / DONE / "00000000").exists()
    put_back(array, "1")
    (array / "closed").unlink()
    (tmp_path / "a.done").unlink()
    close_when(array, ["a.done"])
    assert slurm_task.main(array, "0") == 0
    assert sorted(path.name for path in (array / DONE).iterdir()) == [f"{n:08d}" for n in range(3)]
    assert read_journals(array).repeated == 1


def test_the_error_of_a_piece_reaches_the_command(array):
    (array / TODO / "00000000").write_bytes(pack("bad"))
    assert slurm_task.main(array, "0") == 1
    (failure,) = (array / FAILED).iterdir()
    assert json.loads(failure.read_text())["what"] == "this piece is bad"


def test_a_task_ends_when_its_command_is_gone(array, monkeypatch):
    monkeypatch.setattr(slurm_task, "GONE_SECONDS", -1.0)
    assert slurm_task.main(array, "0") == 0
    assert len(list((array / TODO).iterdir())) == 3
