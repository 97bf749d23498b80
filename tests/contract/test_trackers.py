"""Every tracker keeps the figures of a run, goes on in the same run, and stays off the network.

Each is tested against the files that the real library writes, where it is installed.
"""

import importlib.util
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.train.settings import BUILT_IN_TRACKERS
from graftwork.train.trackers import load_tracker

NAMES = BUILT_IN_TRACKERS

SCRIPT = """
import json, os, socket, sys
from pathlib import Path
reached = []
connect = socket.socket.connect
def refuse(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        reached.append(address)
        raise OSError("no network here")
    return connect(self, address)
socket.socket.connect = refuse
from graftwork.train.trackers import load_tracker
name, folder = sys.argv[1], Path(sys.argv[2])
for attempt in json.loads(sys.argv[3]):
    run = load_tracker(name).open_run("run-1", {"rank": 8, "eval": {"every": 5}}, folder)
    for step in attempt:
        run.log(step, {"train/loss": 1.0 / step, "look/json_valid": 0.5})
    run.close()
assert not reached, reached
"""


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def read_mlflow(folder):
    files = list(Path(folder).glob("*/*/metrics/train/loss"))
    assert len(files) == 1, "one run"
    rows = [line.split() for line in files[0].read_text().splitlines()]
    assert (files[0].parents[2] / "params" / "eval.every").read_text() == "5"
    return [(int(step), float(value)) for _, value, step, *_ in rows]


def read_trackio(folder):
    with sqlite3.connect(Path(folder) / "graftwork.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {row[0] for row in rows} == {"run-1"}
    return [(step, json.loads(figures)["train/loss"]) for _, step, figures in rows]


def read_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    files = sorted(Path(folder).glob("wandb/offline-run-*/run-run-1.wandb"))
    for data in (record for file in files for record in read_log(file.read_bytes())):
        record = Record.FromString(data)
        items = record.history.item
        values = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items}
        if "train/loss" in values:
            found.append((values.get("_step", record.history.step.num), values["train/loss"]))
    # Two attempts within one second give two folders whose names say nothing of their order.
    return sorted(found)


def read_log(content, block=32768):
    """Records of a log in blocks: checksum, length, kind (1 whole, 2 to 4 pieces), bytes."""
    at, pieces = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


READERS = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


def track(name, folder, *attempts):
    """In a process of its own: these libraries leave threads, handlers and variables behind."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(folder), json.dumps(attempts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_tracker_has_a_reader_here():
    assert set(READERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_in_the_same_tracker_run(name, tmp_path):
    if importlib.util.find_spec(load_tracker(name).PACKAGE) is None:
        pytest.skip(f"{name} is not installed")
    track(name, tmp_path, [1, 2, 3], [4, 5])
    found = READERS[name](tmp_path)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert [value for _, value in found] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], rel=1e-6)
