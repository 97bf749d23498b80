"""The doctor: what is there is found, what is missing gets a fix, and no secret is ever shown."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from free_ports import free_port
from graftwork.project.doctor import (
    TorchView,
    check_credentials,
    check_gpus,
    check_machine,
    check_network,
    check_software,
    describe_gpus,
    examine,
    hosts_needed,
    judge_torch,
    parse_gpus,
    requirements,
)
from graftwork.project.folder import ProjectFolder
from graftwork.project.settings import ProjectSettings

SECRET = "hf_thisMustNeverBeShown"
TWO_CARDS = "NVIDIA GeForce RTX 5060 Ti, 580.65, 16311, 15900, 12.0\n" * 2


def project_in(folder: Path, **train) -> ProjectFolder:
    settings = {"project": "p", "data": {"logs": ["log.jsonl"]}, "train": train}
    (folder / "log.jsonl").write_text('{"prompt": "a?", "completion": "b."}\n')
    (folder / "graft.yaml").write_text("project: p\ndata:\n  logs: [log.jsonl]\n")
    return ProjectFolder(root=folder, settings=ProjectSettings.model_validate(settings))


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.fixture
def accounts(tmp_path):
    def look(environment, *, wanted=frozenset(), project=None):
        checks = by_name(
            check_credentials(environment, home=tmp_path, project=project, wanted=frozenset(wanted))
        )
        assert SECRET not in " ".join(f"{check.found} {check.fix}" for check in checks.values())
        return checks

    return look


def test_a_token_in_the_environment_is_named_and_not_shown(accounts):
    found = accounts({"HF_TOKEN": SECRET})["Hugging Face account"]
    assert found.result == "ok"
    assert "HF_TOKEN" in found.found
    assert "environment" in found.found


def test_half_of_a_pair_is_incomplete(accounts):
    found = accounts({"AWS_ACCESS_KEY_ID": SECRET})["AWS account"]
    assert found.result == "note"
    assert "AWS_SECRET_ACCESS_KEY" in found.fix


def test_a_token_in_a_file_that_others_can_read_is_worth_a_note(accounts, tmp_path):
    file = tmp_path / ".cache" / "huggingface" / "token"
    file.parent.mkdir(parents=True)
    file.write_text(SECRET)
    file.chmod(0o600)
    assert accounts({})["Hugging Face account"].result == "ok"
    file.chmod(0o644)
    found = accounts({})["Hugging Face account"]
    assert found.result == "note"
    assert "chmod 600" in found.fix


def test_a_netrc_without_the_host_is_no_account(accounts, tmp_path):
    (tmp_path / ".netrc").write_text(f"machine example.org login a password {SECRET}\n")
    assert "none" in accounts({})["Weights & Biases account"].found


def test_a_key_in_dotenv_alone_is_reported_not_to_be_read(accounts, tmp_path):
    (tmp_path / ".env").write_text(f"# keys\nexport RUNPOD_API_KEY={SECRET}\nKAGGLE_KEY=\n")
    found = accounts({}, project=tmp_path)
    assert ".env" in found["RunPod account"].found
    assert "none" in found["Kaggle account"].found


def test_an_account_that_the_settings_need_is_missing_and_another_only_a_note(accounts):
    found = accounts({}, wanted={"AWS"})
    assert found["AWS account"].result == "missing"
    assert found["AWS account"].fix
    assert found["RunPod account"].result == "note"


def test_cards_are_read_as_the_driver_prints_them():
    cards = parse_gpus(TWO_CARDS + "garbled line\n")
    assert len(cards) == 2
    checks = by_name(describe_gpus(cards))
    assert "2 × NVIDIA GeForce RTX 5060 Ti" in checks["gpu"].found
    assert "driver 580.65" in checks["gpu"].found
    assert "bfloat16" in checks["precision"].found
    assert "FP8" in checks["precision"].found


def test_a_card_that_others_use_is_worth_a_note():
    checks = by_name(describe_gpus(parse_gpus("Tesla T4, 550.1, 15360, 9000, 7.5\n")))
    assert checks["gpu memory"].result == "note"
    assert checks["precision"].result == "note"
    assert "bfloat16" not in checks["precision"].found


def test_an_old_driver_that_does_not_know_the_capability_is_read_all_the_same():
    (card,) = parse_gpus("Tesla P100, 390.1, 16280, 16000, [N/A]\n")
    assert card.capability is None
    assert "precision" not in by_name(describe_gpus((card,)))


@pytest.mark.parametrize(
    ("sight", "result"),
    [
        (None, "note"),
        (TorchView("2.13+cpu", None, False, (), ()), "missing"),
        (TorchView("2.13", "13.0", True, ("sm_75", "sm_80", "sm_90"), (("P100", 6, 0),)), "missing"),
        (TorchView("2.13", "13.0", True, ("sm_80", "compute_90"), (("new", 12, 0),)), "ok"),
        (TorchView("2.13", "13.0", True, ("sm_80",), (("A10", 8, 6),)), "ok"),
        (TorchView("2.13", "13.0", True, ("sm_86",), (("A100", 8, 0),)), "missing"),
    ],
)
def test_torch_must_have_kernels_for_the_card(sight, result):
    (check,) = judge_torch(sight, parse_gpus(TWO_CARDS))
    assert check.result == result
    assert check.fix or result == "ok"


def test_a_driver_that_shows_no_card_is_missing(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'No devices were found'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (check,) = check_gpus()
    assert (check.name, check.result) == ("gpu", "missing")


def test_the_disk_is_held_against_the_plan(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=100 * 2**30)
    monkeypatch.setattr("graftwork.project.doctor.shutil.disk_usage", lambda _folder: usage)
    assert by_name(check_machine(tmp_path, disk_gib=0.001))["disk"].result == "ok"
    short = by_name(check_machine(tmp_path, disk_gib=1e9))["disk"]
    assert short.result == "missing"
    assert short.fix


def test_looking_leaves_nothing_behind(tmp_path):
    by_name(check_machine(tmp_path / "new", disk_gib=None))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert by_name(check_machine(tmp_path / "file", disk_gib=None))["write access"].result == "missing"


def test_requirements_are_read_by_extra_with_their_least_version():
    listed = ["pydantic>=2.10", "torch>=2.11; extra == 'train'", "graftwork[train]; extra == 'serve'",
              "uvloop>=0.21; platform_system != 'Windows' and extra == 'serve'"]  # fmt: skip
    assert requirements(None, listed) == {"pydantic": "2.10"}
    assert requirements("train", listed) == {"torch": "2.11"}
    assert requirements("serve", listed) == {}


def test_an_old_package_is_missing_only_where_it_is_needed(monkeypatch):
    from graftwork.project import doctor as machine

    monkeypatch.setattr(machine.metadata, "requires", lambda _name: ["torch>=999; extra == 'train'"])
    assert by_name(check_software(needed=True))["packages [train]"].result == "missing"
    found = by_name(check_software(needed=False))["packages [train]"]
    assert found.result == "note"
    assert "wanted 999" in found.found


def test_hosts_are_those_that_settings_and_accounts_need(tmp_path):
    project = project_in(
        tmp_path, run={"mirror": "s3://bucket/runs", "alerts": {"webhook": "http://alerts.example:8080/x"}}
    )
    hosts = set(hosts_needed(project, {"RUNPOD_API_KEY": SECRET}))
    assert hosts == {("s3.amazonaws.com", 443), ("alerts.example", 8080), ("api.runpod.io", 443)}
    elsewhere = {"RUNPOD_API_KEY": SECRET, "RUNPOD_API_BASE_URL": "http://stand-in:8080"}
    assert list(hosts_needed(None, elsewhere)) == [("stand-in", 8080)]
    assert hosts_needed(project_in(tmp_path), {}) == {}


def test_a_port_that_answers_is_ok_and_one_that_does_not_is_missing(tmp_path, monkeypatch):
    import socket

    for name in ("HTTPS_PROXY", "https_proxy", "HF_TOKEN", "RUNPOD_API_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    port = free_port()  # one that nobody is given once the server is gone
    project = project_in(tmp_path, run={"alerts": {"webhook": f"http://127.0.0.1:{port}/"}})
    with socket.create_server(("127.0.0.1", port)):
        assert [check.result for check in check_network(project)] == ["ok"]
    assert [check.result for check in check_network(project)] == ["missing"]


def test_without_being_asked_nothing_is_connected_to(tmp_path, monkeypatch):
    import socket

    def refuse(*_arguments, **_more):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "create_connection", refuse)
    project = project_in(tmp_path, run={"mirror": "s3://bucket/runs"})
    assert "network" not in {check.group for check in examine(project)}


def test_a_configuration_that_is_wrong_is_reported_by_the_doctor_too(tmp_path):
    project = project_in(tmp_path)
    (tmp_path / "graft.yaml").write_text("project: p\ndata:\n  logs: [log.jsonl]\n  max_tokens: 900000\n")
    found = by_name(examine(project))["configuration"]
    assert found.result == "note"
    assert "900000" in found.found
