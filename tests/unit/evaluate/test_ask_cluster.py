"""An evaluation on a cluster that is stopped leaves nothing running there."""

import threading
from types import SimpleNamespace

from graftwork.evaluate.ask import shards as shard_processes


class BusyCluster:
    """Works on its pieces until it is stopped."""

    name = "stand-in"

    def __init__(self):
        self.begun, self.stopped = threading.Event(), threading.Event()

    def run(self, pieces, **_options):
        list(pieces)
        self.begun.set()
        assert self.stopped.wait(60)
        yield from ()

    def stop(self):
        self.stopped.set()


def test_a_stopped_evaluation_ends_the_tasks_of_its_shards(tmp_path):
    folders = [tmp_path / "shards" / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    shards = [SimpleNamespace(folder=str(folder), to_json=lambda: "{}") for folder in folders]
    copied, cluster = [], BusyCluster()
    shard_processes.ask_on_cluster(
        shards,
        cluster,
        SimpleNamespace(copy_from=copied.extend),
        on_poll=lambda: None,
        stop_asked=cluster.begun.is_set,
    )
    assert cluster.stopped.is_set()
    assert copied == folders
