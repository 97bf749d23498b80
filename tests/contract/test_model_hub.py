"""Base models by Hub name, through the official client against a server that speaks the Hub's protocol."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import TOKEN, running_hub

from graftwork.cli.main import app
from graftwork.model.base import (
    find_base,
    is_ready,
    list_models,
    loadable_name,
    pull_model,
    remove_model,
    verify_base,
)
from graftwork.model.hub import HubStore, find_local, parse_hub_name
from graftwork.records.errors import Corrupted, EnvironmentFailure, UserError

NAME = "acme/small"
WEIGHTS = bytes(range(256)) * 4096
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "README.md": b"# small",
    "pytorch_model.bin": b"never fetched",
    "onnx/config.json": b"{}",
}
FILES = {**SMALL, "model.safetensors": WEIGHTS, "consolidated.safetensors": WEIGHTS[::-1]}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub() as server:
        server.public = True
        server.repositories[NAME] = {}
        server.commit(NAME, FILES)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    (root / "graft.yaml").write_text(f"project: p\nbase: {NAME}\ndata: {{logs: [log.jsonl]}}\n")
    return root


class Listener:
    def __init__(self, folder: Path, *, free: int = 1 << 40) -> None:
        self.messages: list[str] = []
        self.seen: list[tuple[int, int]] = []
        self.store = HubStore(
            folder,
            announce=self.messages.append,
            progress=lambda _phase, done, total: self.seen.append((done, total)),
            free_bytes=lambda _path: free,
        )


@pytest.fixture
def listener(tmp_path):
    return Listener(tmp_path / "cache" / "models" / "hub")


def fetched(hub):
    return [path.rsplit("/", 1)[1] for path in hub.asked if "/resolve/" in path]


def test_planning_fetches_no_weights_and_knows_the_fingerprint_of_all_files(hub, project, listener):
    light = find_base(NAME, project_folder=project, store=listener.store)
    assert set(fetched(hub)) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert is_ready(NAME, project_folder=project)
    assert not is_ready(NAME, project_folder=project, weights=True)
    whole = find_base(NAME, project_folder=project, weights=True, store=listener.store)
    assert whole == light
    assert sorted(whole.files) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    verify_base(whole)
    assert is_ready(NAME, project_folder=project, weights=True)


def test_a_second_project_downloads_nothing(hub, project, tmp_path, listener):
    find_base(NAME, project_folder=project, weights=True, store=listener.store)
    commit = hub.head(NAME)
    before = len(hub.asked)
    other = tmp_path / "other"
    other.mkdir()
    again = find_base(f"{NAME}@{commit}", project_folder=other, weights=True, store=listener.store)
    assert len(hub.asked) == before
    assert again.name == f"{NAME}@{commit}"


def test_the_download_is_announced_with_its_size_and_its_progress_reaches_the_total(hub, project, listener):
    find_base(NAME, project_folder=project, weights=True, store=listener.store)
    assert "fetching the weights of acme/small from 127.0.0.1" in listener.messages[0]
    assert "1.0 MB" in listener.messages[0]
    assert listener.seen[-1][0] == listener.seen[-1][1] > len(WEIGHTS)


def test_the_project_stays_on_its_commit_when_the_revision_moves(hub, project, listener):
    first = find_base(NAME, project_folder=project, store=listener.store)
    hub.commit(NAME, {**FILES, "config.json": b'{"model_type": "llama", "new": 1}'})
    assert find_base(NAME, project_folder=project, store=listener.store) == first
    assert json.loads((project / ".graft" / "bases.json").read_text()) == {NAME: first.name.split("@")[1]}
    pulled = pull_model(NAME, project_folder=project, store=listener.store)
    assert (pulled.commit, pulled.moved_to) == (first.name.split("@")[1], hub.head(NAME))
    moved = pull_model(NAME, project_folder=project, store=listener.store, update=True)
    assert (moved.commit, moved.moved_to) == (hub.head(NAME), None)
    assert find_base(NAME, project_folder=project, store=listener.store).revision != first.revision


def test_an_update_that_fails_leaves_the_project_on_its_commit(hub, project, listener):
    first = pull_model(NAME, project_folder=project, store=listener.store)
    hub.commit(NAME, {**FILES, "model.safetensors": WEIGHTS[1:]})
    hub.corrupt.add("model.safetensors")
    with pytest.raises(Corrupted):
        pull_model(NAME, project_folder=project, store=listener.store, update=True)
    [model] = [model for model in list_models(project_folder=project, bases=(NAME,)).models if model.pinned]
    assert model.commit == first.commit


def test_a_tag_is_a_revision(hub, project, listener):
    hub.tags[NAME, "v1"] = hub.head(NAME)
    hub.commit(NAME, {**FILES, "config.json": b"{}"})
    base = find_base(f"{NAME}@v1", project_folder=project, store=listener.store)
    assert base.name == f"{NAME}@{hub.tags[NAME, 'v1']}"
    with pytest.raises(UserError, match="has no revision 'v2'"):
        find_base(f"{NAME}@v2", project_folder=project, store=listener.store)


def test_an_interrupted_download_continues_where_it_stopped(hub, project, listener, monkeypatch):
    # The client waits a second before each of its own attempts.
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _seconds: None))
    # The client writes pieces of 10 MiB: what is lost is less than one of them.
    large = WEIGHTS * 24
    hub.commit(NAME, {**FILES, "model.safetensors": large})
    hub.cuts = [12 << 20] + [0] * 40
    with pytest.raises(EnvironmentFailure, match="could not be fetched") as caught:
        find_base(NAME, project_folder=project, weights=True, store=listener.store)
    assert "continues where it stopped" in caught.value.fix
    hub.cuts.clear()
    hub.ranges.clear()
    base = find_base(NAME, project_folder=project, weights=True, store=listener.store)
    verify_base(base)
    assert hub.ranges == [f"bytes={10 << 20}-"]


def test_a_file_with_another_hash_is_refused_and_removed(hub, project, listener):
    hub.corrupt.add("model.safetensors")
    with pytest.raises(Corrupted, match=r"model\.safetensors of acme/small has a different hash"):
        find_base(NAME, project_folder=project, weights=True, store=listener.store)
    hub.corrupt.clear()
    verify_base(find_base(NAME, project_folder=project, weights=True, store=listener.store))


def test_a_damaged_config_is_refused(hub, project, listener):
    hub.corrupt.add("config.json")
    with pytest.raises(Corrupted, match=r"config\.json"):
        find_base(NAME, project_folder=project, store=listener.store)


def test_a_gated_model_names_its_page_and_the_token(hub, project, listener):
    hub.gated.add(NAME)
    with pytest.raises(UserError, match="is gated") as caught:
        find_base(NAME, project_folder=project, store=listener.store)
    assert "https://huggingface.co/acme/small" in caught.value.fix
    assert "HF_TOKEN" in caught.value.fix


def test_a_private_model_is_read_with_the_token_and_without_it_is_not_found(
    hub, project, listener, monkeypatch
):
    hub.public = False
    with pytest.raises(UserError, match="there is no base model"):
        find_base(NAME, project_folder=project, store=listener.store)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_base(NAME, project_folder=project, store=listener.store).name.startswith(NAME)


def test_a_full_disk_is_said_before_the_download(hub, project, tmp_path):
    listener = Listener(tmp_path / "cache" / "models" / "hub", free=1000)
    with pytest.raises(EnvironmentFailure, match="the disk has no room for acme/small") as caught:
        find_base(NAME, project_folder=project, weights=True, store=listener.store)
    assert "graft model remove" in caught.value.fix
    assert "model.safetensors" not in fetched(hub)


def test_offline_only_what_is_here_is_used(hub, project, listener, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentFailure, match="not on this machine") as caught:
        find_base(NAME, project_folder=project, store=listener.store)
    assert "graft model pull acme/small" in caught.value.fix
    monkeypatch.delenv("HF_HUB_OFFLINE")
    find_base(NAME, project_folder=project, weights=True, store=listener.store)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_base(NAME, project_folder=project, weights=True, store=listener.store).files


def test_weights_that_can_run_code_are_refused(hub, project, listener):
    hub.repositories["acme/old"] = {}
    hub.commit("acme/old", SMALL)
    with pytest.raises(UserError, match=r"has no \*\.safetensors") as caught:
        find_base("acme/old", project_folder=project, store=listener.store)
    assert "can run code" in caught.value.why
    assert not fetched(hub)


def test_of_sharded_weights_only_those_in_the_index_are_fetched(hub, project, listener):
    shards = {f"model-0000{n}-of-00002.safetensors": WEIGHTS[:1000] * n for n in (1, 2)}
    index = {"weight_map": {f"layer.{n}": name for n, name in enumerate(shards)}}
    hub.repositories["acme/large"] = {}
    files = {**SMALL, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    hub.commit("acme/large", {**files, "consolidated.safetensors": WEIGHTS})
    base = find_base("acme/large", project_folder=project, weights=True, store=listener.store)
    assert set(shards) == {name for name in base.files if name.endswith(".safetensors")}
    verify_base(base)


def test_a_model_is_listed_with_its_pin_and_removed_with_its_bytes(hub, project, listener):
    pull_model(NAME, project_folder=project, store=listener.store)
    [model] = list_models(project_folder=project, bases=(NAME,)).models
    assert (model.name, model.pinned, model.has_weights) == (NAME, True, True)
    removed = remove_model(NAME)
    assert removed.freed_bytes > len(WEIGHTS)
    assert not list_models(project_folder=project).models
    assert find_local(parse_hub_name(NAME), model.commit, listener.store) is None
    with pytest.raises(UserError, match="is not on this machine"):
        remove_model(NAME)


def test_files_that_were_removed_from_the_cache_are_fetched_again(hub, project, listener):
    base = find_base(NAME, project_folder=project, weights=True, store=listener.store)
    (Path(base.folder) / "model.safetensors").resolve().unlink()
    assert not is_ready(NAME, project_folder=project, weights=True)
    assert find_base(NAME, project_folder=project, weights=True, store=listener.store) == base


def test_an_adapter_names_the_repository_without_the_commit():
    assert loadable_name(f"{NAME}@{'a' * 40}") == NAME
    assert loadable_name("models/mine") == "models/mine"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@main", ("Qwen/Qwen3-0.6B", "main")),
        ("Qwen/Qwen3-0.6B@refs/pr/3", ("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("smollm2-135m-instruct", None),
        ("./models/mine", None),
        ("/models/mine", None),
        ("~/models/mine", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/..", None),
        ("a/b@", None),
        ("a/b@../x", None),
        ("", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(name, expected):
    found = parse_hub_name(name)
    assert (None if found is None else tuple(found)) == expected


def test_the_commands_pull_list_and_remove(hub, project, monkeypatch, capsys):
    monkeypatch.chdir(project)

    def graft(*arguments):
        app(["model", *arguments, "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    assert graft("pull")["commit"] == hub.head(NAME)
    assert [model["name"] for model in graft("list")["models"]] == [NAME]
    assert graft("remove", NAME)["removed"] == [f"{NAME}@{hub.head(NAME)}"]
