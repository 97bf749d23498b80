"""The benchmark of full fine-tuning runs its cases, tiny, on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import train_full
from train_full import Case, plan


@pytest.fixture(autouse=True)
def _as_it_was():
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_streamed_case_reports_what_was_planned_and_what_came():
    found = train_full.run_streamed(Case("tiny", "streamed", "tiny", 1))
    assert found["tokens_per_second"] > 0
    assert found["planned_gib"] > found["counted_gib"] > 0
    assert found["planned_host_gib"] > 0
    assert found["planned_step_seconds"] > 0
    assert found["same_gradients"]


def test_a_run_resumes_from_the_checkpoint_to_the_same_bytes(tmp_path):
    cut = {"folder": str(tmp_path / "cut")}
    whole = train_full.run_attempt(Case("tiny", "attempt", "tiny", 1, 60, {**cut, "whole": True}))
    train_full.run_attempt(Case("tiny", "attempt", "tiny", 1, 60, {"folder": str(tmp_path / "other")}))
    (saved,) = (tmp_path / "other" / "checkpoints").iterdir()
    assert saved.name == "step-000002"
    resumed = train_full.run_attempt(
        Case("tiny", "attempt", "tiny", 1, 60, {"folder": str(tmp_path / "other")})
    )
    assert resumed["state"] == whole["state"]


def test_the_cases_of_the_card_fit_their_caps_and_128_gib_of_the_host(monkeypatch):
    from graftwork.plan.catalog.hardware import find_gpu
    from graftwork.plan.fit import project as fit

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: find_gpu("H200").name)
    here = fit.this_host().model_copy(update={"ram_gib": 128.0})
    monkeypatch.setattr(fit, "this_host", lambda: here)
    for case in train_full.CASES:
        if case.kind in ("streamed", "resume"):
            step = plan(case)
            assert step.dtype == "bfloat16"
            assert step.peak_gib * 1.08 <= case.cap_gib, case.name
            assert step.host_gib <= 124, case.name
