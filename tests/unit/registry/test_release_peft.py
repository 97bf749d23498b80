"""A PEFT folder from anywhere becomes a release that nobody has judged; pickles and damage do not get in."""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import BASE_PRINT, PROJECT, TEMPLATE_PRINT, WHEN, write_adapter

from graftwork.files.disk import folder_digest
from graftwork.records.errors import GraftError, NegativeResult
from graftwork.records.report import Verdict
from graftwork.registry.index import Change, promote
from graftwork.registry.manifest import ReleaseContext
from graftwork.registry.peft import choose_weight_files, import_peft_folder
from graftwork.registry.store import ReleaseStore

CONTEXT = ReleaseContext(PROJECT, "small", BASE_PRINT, TEMPLATE_PRINT, None, WHEN, {}, {})


def take(folder):
    return import_peft_folder(folder, context=CONTEXT)


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "peft")


def test_a_peft_folder_becomes_a_release_without_a_deploy_verdict(folder, tmp_path):
    taken = take(folder)
    store = ReleaseStore.open(tmp_path / "store")
    release = store.put(taken[0], sources=taken[1])
    assert (release.decision, release.run_id) == ("not_enough_evidence", "imported")
    assert release.settings["origin"] == "imported"
    assert release.adapter_hash == folder_digest(folder)
    assert store.verify(release.id) == release
    index = InMemoryReleaseIndex(project=PROJECT)
    index.add(release)
    with pytest.raises(NegativeResult, match="not cleared"):
        promote(index, release, alias="champion", change=Change("me", WHEN))


@pytest.mark.parametrize("missing", [0, 1])
def test_the_weights_end_where_the_last_tensor_of_the_header_ends(folder, missing):
    spans = {"b": [2, 4], "a": [0, 2]}
    entries = {name: {"dtype": "U8", "shape": [2], "data_offsets": span} for name, span in spans.items()}
    header = json.dumps(entries).encode()
    weights = len(header).to_bytes(8, "little") + header + b"1234"[: 4 - missing]
    (folder / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(GraftError, match="is incomplete") if missing else nullcontext():
        take(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_is_full_weights_only_with_both_files(file):
    assert choose_weight_files({"config.json", "model.safetensors"}) == ("config.json", "model.safetensors")
    assert choose_weight_files({file}) == ("adapter_config.json", "adapter_model.safetensors")


def test_the_same_folder_is_the_same_release_whenever_it_is_imported(folder):
    later = import_peft_folder(folder, context=replace(CONTEXT, created_at="2031-01-01T00:00:00Z"))
    assert later[0].id == take(folder)[0].id


def test_files_that_do_not_belong_to_an_adapter_are_left_out_and_reported(folder):
    (folder / "training_args.bin").write_bytes(b"\x80\x04")
    (folder / "README.md").write_text("their words")
    taken = take(folder)
    assert taken[3] == ("README.md", "training_args.bin")
    assert b"their words" not in taken[1]["README.md"]


def test_the_base_name_of_an_adapter_cannot_break_the_model_card(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": 'x"\n---\nlicense: mit'})
    )
    card = take(folder)[1]["README.md"].decode()
    assert card.count("\n---\n") == 1


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def pickled_under_another_name(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(100))


def linked(folder):
    (folder / "adapter_model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "adapter_model.safetensors").symlink_to(folder.parent / "elsewhere")


def cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder):
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def configured(text):
    return lambda folder: (folder / "adapter_config.json").write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        pickled,
        pickled_under_another_name,
        linked,
        cut,
        empty,
        configured("no JSON"),
        configured("[]"),
        configured('{"r": 8}'),
        configured('{"peft_type": "LORA", "base_model_name_or_path": {}}'),
        configured("[" * 100_000),
        lambda folder: (folder / "adapter_config.json").unlink(),
    ],
)
def test_an_incomplete_adapter_is_refused(folder, spoil):
    spoil(folder)
    with pytest.raises(GraftError) as reported:
        take(folder)
    assert reported.value.why
    assert reported.value.fix


@pytest.mark.parametrize(
    ("known", "decision"),
    [
        ("abort", "abort"),
        ("iterate", "iterate"),
        ("deploy", "not_enough_evidence"),
        ("not_enough_evidence", "not_enough_evidence"),
    ],
)
def test_a_refusal_of_the_same_weights_is_not_forgotten(folder, known, decision):
    weights = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    output = {weights: Verdict(decision=known, reason="it is worse", rules=(), report_hash="")}
    taken = import_peft_folder(folder, context=CONTEXT, find_verdict=output.__getitem__)
    assert taken[0].decision == decision
    kept = Verdict.from_json(taken[1]["verdict.json"])
    assert kept.decision == decision
    assert ("it is worse" in kept.reason) == (decision in ("abort", "iterate"))
