"""Breaks manifests at random and reads them: no error but our own, and nothing altered passes as unaltered.

    python tests/fuzz/fuzz_manifests.py [--seconds N] [--seed S]

Release manifests (in a store, an archive and a store at a URL), checkpoint manifests, adapter configs and
weights, dataset manifests. Runs until it is stopped or the time is over. What fails is printed with its seed,
by which it comes again: each round has a seed of its own.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from archive_corpus import Good, name_by_content
from fuzz_readers import break_value, walk
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, dataset, parts, publish_parts, write_adapter

from graftwork.files.dataset import hash_manifest
from graftwork.files.dataset import read_manifest as read_dataset
from graftwork.files.disk import folder_digest
from graftwork.model.adapter_shape import AdapterShape, from_peft, parse_peft, to_peft
from graftwork.records.errors import GraftError
from graftwork.registry.archive import read_archive
from graftwork.registry.folder import read_manifest, verify_release
from graftwork.registry.manifest import ReleaseContext
from graftwork.registry.peft import import_peft_folder, inspect_adapter
from graftwork.registry.remote_store import RemoteStore
from graftwork.registry.store import ReleaseStore
from graftwork.train.checkpoints import (
    CONTENT,
    CheckpointManifest,
    list_saved,
    step_name,
    verify_checkpoint,
)

DEEP = 5_000
MARK = "\u0001mark {} \u0001"
TEXTS = [
    *("1e999", "-1e999", "NaN", "Infinity", "-0", "1e-999", "9" * 400, "9" * 4300, "9" * 5000, "0.1e1"),
    *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 150 + "]" * 150, "[" * DEEP),
    *(r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"', '"\\"', '"' + "x" * 5000 + '"', "truE", ""),
]
"""JSON that no Python value is written as; put in place of a value."""
VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**70,
        0.5,
        "",
        "x",
        "..",
        "/",
        "../../x",
        "a" * 64,
        "0" * 64,
    ),
    *([], {}, [[]], [None], {"": ""}, {"a": {"a": 1}}, ["x"] * 50, "main", "deploy", "(a+)+$", "(", "\n"),
]
NAMES = ["id", "files", "model", "licence", "r", "step", "x"]
BYTES = [b"", b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xef\xbb\xbf", b":", b"1"]
PATHS = [f"model.layers.{n}.{part}" for n in range(4) for part in ("self_attn.q_proj", "mlp.down_proj")]


Result = TypeVar("Result")


class Failed(AssertionError):
    """A promise of the readers does not hold."""


class Samples:
    """Good manifests to break, made once."""

    def __init__(self, folder: Path) -> None:
        self.adapter = write_adapter(folder / "adapter")
        store = ReleaseStore.open(folder / "store")
        made = publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(self.adapter))
        self.release = store.folder(made.id)
        files = {path.name: path.read_bytes() for path in self.release.iterdir()}
        self.good = Good(json.loads(files.pop("manifest.json")), files)
        nameless = dataset().model_copy(update={"content_hash": ""})
        self.dataset = json.loads(
            nameless.model_copy(update={"content_hash": hash_manifest(nameless)}).to_json()
        )
        shape = AdapterShape(rank=8, alpha=16.0, targets=("q_proj",), layers=(0, 1), ranks={"q_proj": 4})
        self.config = to_peft(shape, "base")
        self.header = {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
        self.content = {name: name.encode() for name in CONTENT}
        self.checkpoint = {
            "step": 3,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in self.content.items()},
            "sizes": {name: len(data) for name, data in self.content.items()},
            "score": 0.5,
        }


def fuzz_once(samples: Samples, folder: Path, seed: int) -> None:
    """One round: each kind of manifest broken in its own way."""
    dice = random.Random(seed)
    for check in (check_release, check_archive, check_place, check_checkpoint, check_adapter, check_dataset):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            check(samples, Path(scratch), dice)


def check_release(samples: Samples, folder: Path, dice: random.Random) -> None:
    """A release whose manifest was altered is refused, or says what it says by an id of its own."""
    text = broken_release(samples, dice)
    shutil.copytree(samples.release, folder / "release")
    path = folder / "release" / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(text)
    for read in (read_manifest, verify_release):
        found = allowed(lambda read=read: read(folder / "release"))
        if found is not None and found.id == samples.good.id:
            require_same(json.loads(found.to_json()), samples.good.manifest)


def check_archive(samples: Samples, folder: Path, dice: random.Random) -> None:
    """An archive with a broken manifest, put into a store: a whole release, or no trace."""
    text = broken_release(samples, dice)
    release_id = samples.good.id
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        release_id = str(json.loads(text)["id"])
    # The name of the folder in the archive, as long as an id is and in plain letters.
    name = release_id[:64].encode("ascii", "ignore").decode().replace("\0", "")
    (folder / "one.tar").write_bytes(Good({"id": name}, samples.good.files).archive_with(text))
    store = ReleaseStore.open(folder / "far")

    def take() -> None:
        with store.shared_lock(), read_archive(folder / "one.tar", store=store) as unpacked:
            unpacked.put_into(store)

    allowed(take)
    for release_id in store.ids():
        store.verify(release_id)
    if list((folder / "far").glob(".*.part")):
        raise Failed("an import left something behind")


def check_place(samples: Samples, folder: Path, dice: random.Random) -> None:
    there = folder / "releases" / samples.good.id
    there.mkdir(parents=True)
    (there / "manifest.json").write_bytes(broken_release(samples, dice))
    found = allowed(lambda: RemoteStore(f"file://{folder}").read(samples.good.id))
    if found is not None:
        require_same(json.loads(found.to_json()), samples.good.manifest)


def check_checkpoint(samples: Samples, folder: Path, dice: random.Random) -> None:
    """A checkpoint with a broken manifest is Corrupted; looking over all of them never fails."""
    path = folder / step_name(3)
    path.mkdir()
    for name, data in samples.content.items():
        (path / name).write_bytes(data)
    text = broken(samples.checkpoint, dice)
    (path / "manifest.json").write_bytes(text)
    found = allowed(lambda: CheckpointManifest.from_json(text, where="here"))
    if found is not None and (found.step < 0 or min(found.sizes.values()) < 0):
        raise Failed("a step or a size is below zero")
    allowed(lambda: verify_checkpoint(path))
    list_saved(folder)


def check_adapter(samples: Samples, folder: Path, dice: random.Random) -> None:
    """A PEFT folder with a broken config or header is refused, or has a shape that can be used."""
    adapter = folder / "adapter"
    shutil.copytree(samples.adapter, adapter)
    config = broken(samples.config, dice) if dice.random() < 0.7 else json.dumps(samples.config).encode()
    (adapter / "adapter_config.json").write_bytes(config)
    if dice.random() < 0.5:
        head = broken(samples.header, dice)
        length = dice.choice([len(head), len(head), len(head), 0, 2**63, len(head) + 1])
        weights = length.to_bytes(8, "little") + head + b"\1\2\3\4"
        (adapter / "adapter_model.safetensors").write_bytes(weights)
    context = ReleaseContext(
        project="p",
        base="b",
        base_fingerprint="f",
        template_fingerprint="t",
        parent=None,
        created_at="now",
        settings={},
        versions={},
    )
    allowed(lambda: import_peft_folder(adapter, context=context))
    allowed(lambda: inspect_adapter(adapter, expected_hash=folder_digest(adapter)))
    shape = allowed(lambda: from_peft(parse_peft(config, where="here"), layers=4, paths=PATHS, where="here"))
    if shape is not None:
        for path in PATHS:
            shape.wants(path)
            shape.scale_of(path)


def check_dataset(samples: Samples, folder: Path, dice: random.Random) -> None:
    """A dataset's manifest is the one that its hash names, or it is damaged."""
    text = broken(samples.dataset, dice)
    (folder / "manifest.json").write_bytes(text)
    found = allowed(lambda: read_dataset(folder))
    if found is not None and found.content_hash == samples.dataset["content_hash"]:
        require_same(json.loads(found.to_json()), samples.dataset)


def allowed(read: Callable[[], Result]) -> Result | None:
    """What was read; None where it was refused as an expected error."""
    began = time.perf_counter()
    try:
        return read()
    except GraftError as refused:
        if not refused.what:
            raise Failed("a refusal says nothing") from refused
        return None
    finally:
        # Far beyond what any of it takes on a busy machine: a pattern or a size that grows without bound.
        if time.perf_counter() - began > 60:
            raise Failed("reading took more than a minute")


def require_same(found: object, good: object) -> None:
    """The time is the one thing that an id does not cover."""
    if not isinstance(found, dict) or not isinstance(good, dict):
        raise Failed("a manifest is no object")
    for key in found.keys() | good.keys():
        if key != "created_at" and found.get(key) != good.get(key):
            raise Failed(f"{key} was altered, and the hash is the old one")


def broken_release(samples: Samples, dice: random.Random) -> bytes:
    """The manifest broken; sometimes with an id that fits what it says now, as an attacker would give it."""
    manifest = copy.deepcopy(samples.good.manifest)
    if dice.random() < 0.3:
        manifest["format"] = 1
    if dice.random() < 0.5:
        for _ in range(dice.randint(1, 3)):
            break_value(manifest, dice, values=VALUES, names=NAMES)
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            manifest["id"] = name_by_content(manifest)
        return json.dumps(manifest).encode()
    return broken(manifest, dice)


def broken(value: dict, dice: random.Random) -> bytes:
    """JSON of it with values replaced, moved or lost; texts that are no Python value; or broken bytes."""
    value = copy.deepcopy(value)
    texts = []
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.4:
            texts.append(dice.choice(TEXTS))
            put_mark(value, MARK.format(len(texts) - 1), dice)
        else:
            break_value(value, dice, values=VALUES, names=NAMES)
    data = json.dumps(value)
    for number, text in enumerate(texts):
        data = data.replace(json.dumps(MARK.format(number)), text)
    raw = data.encode(errors="surrogatepass")
    return break_bytes(raw, dice) if dice.random() < 0.3 else raw


def put_mark(value: dict, mark: str, dice: random.Random) -> None:
    holder, key = dice.choice(list(walk(value)) or [(value, "x")])
    holder[key] = mark


def break_bytes(data: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randint(1, 4)):
        place = dice.randint(0, len(data))
        act = dice.random()
        if act < 0.5:
            data = data[:place] + dice.choice(BYTES) + data[place + dice.randint(0, 2) :]
        elif act < 0.8:
            data = data[:place] + data[place + dice.randint(1, 20) :]
        else:
            data = data[:place]
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, seed = time.monotonic(), options.seed
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(Path(folder))
        while options.seconds is None or time.monotonic() - began < options.seconds:
            try:
                fuzz_once(samples, Path(folder), seed)
            except BaseException:
                print(f"seed {seed}")
                raise
            seed += 1
    print(f"{seed - options.seed} rounds, no fault")


if __name__ == "__main__":
    main()
