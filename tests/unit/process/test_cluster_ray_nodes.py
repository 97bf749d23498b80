"""Nodes of a Ray cluster are checked before work is sent to them."""

import sys
from types import SimpleNamespace

import pytest

from graftwork.process import ray_cluster
from graftwork.process.ray_cluster import check_nodes
from graftwork.records.errors import EnvironmentFailure

HERE = {"node": "a", "stamp": "1", "shared": True}


class FakeRay:
    """Two nodes, of which `b` is not responding; Ray notices its death after `notices_after` looks."""

    def __init__(self, *, notices_after):
        self.looks, self.notices_after = 0, notices_after

    def nodes(self):
        self.looks += 1
        return [
            {"NodeID": "a", "NodeManagerHostname": "a", "Alive": True},
            {"NodeID": "b", "NodeManagerHostname": "b", "Alive": self.looks <= self.notices_after},
        ]

    def remote(self, _function):
        return SimpleNamespace(options=lambda scheduling_strategy, **_: SimpleNamespace(
            remote=lambda _folder: scheduling_strategy
        ))  # fmt: skip

    def get(self, node_id, timeout):
        if node_id == "b":
            raise ConnectionError("the worker died")
        return HERE


@pytest.fixture(autouse=True)
def affinity(monkeypatch):
    module = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", module)
    monkeypatch.setattr(ray_cluster.time, "sleep", lambda _seconds: None)


def test_a_node_that_dies_during_the_check_is_left_out():
    check_nodes(FakeRay(notices_after=3), "1", "/shared")


def test_a_node_that_lives_and_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(ray_cluster, "NOTICE_SECONDS", 0.0)
    with pytest.raises(EnvironmentFailure, match="the node b is not responding"):
        check_nodes(FakeRay(notices_after=10**9), "1", "/shared")
