"""A map over pieces on a cluster: what nodes get and refuse, and what happens when it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.process import pieces as module
from graftwork.process.pieces import (
    EngineLost,
    MapEngine,
    MapWork,
    NodeRefused,
    RemoteWork,
    code_stamp,
    pack,
    read_journals,
    require_same_code,
    unpack,
    work_on,
)
from graftwork.records.errors import EnvironmentFailure

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(head=JSON, blobs=st.lists(st.binary(max_size=50), max_size=4))
def test_what_is_packed_is_unpacked_the_same(head, blobs):
    assert unpack(pack(head, *blobs)) == (head, blobs)


def test_a_message_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a different length"):
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
    with pytest.raises(EnvironmentFailure, match="its file is not here"):
        list(engine.map(range(5), work))


def test_a_node_with_other_code_is_refused_by_name():
    require_same_code(code_stamp(), "n1")
    with pytest.raises(NodeRefused, match=r"the node n1 has graftwork .*, this command 0.0.9") as caught:
        require_same_code("0.0.9+abc", "n1")
    assert caught.value.where == "n1"


def prepare_shared(head, _blobs):
    return head


def note_piece(context, head, _blobs):
    (module.Path(context) / f"{head}.done").touch()


def test_a_piece_that_is_begun_again_is_counted_as_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib, "import_module", lambda _name: __import__(__name__))
    order = {"entry": "graftwork.tests:note_piece", "stamp": code_stamp(), "folder": str(tmp_path)}
    for number, head, node in ((0, "a", "h1"), (1, "b", "h2"), (0, "a", "h2")):
        work_on({**order, "piece": f"{number:08d}", "node": node}, pack(str(tmp_path)), pack(head))
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["a.done", "b.done"]
    assert read_journals(tmp_path) == ({"h1": 1, "h2": 2}, 1)
