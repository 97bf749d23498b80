"""The stored gradients of TRL are those that TRL computes; `make test-trl` installs TRL apart."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: make test-trl"
)
STORED = json.loads((ROOT / "tests" / "data" / "trl_reference.json").read_text())


def assert_same(found, stored):
    ours, theirs = torch.tensor(found["gradient"]), torch.tensor(stored["gradient"])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert found["loss"] == pytest.approx(stored["loss"], rel=1e-5)


def test_stored_gradients_are_those_of_trl():
    sys.path.insert(0, str(ROOT / "tools"))
    import trl_reference

    trainer = trl_reference.make_policy_trainer()
    for name, case in trl_reference.POLICY_CASES.items():
        assert_same(trl_reference.policy_case(trainer, case), STORED["policy"][name])
    for name, case in trl_reference.PREFERENCE_CASES.items():
        assert_same(trl_reference.preference_case(case), STORED["preference"][name])
    for name, case in trl_reference.KTO_CASES.items():
        assert_same(trl_reference.kto_case(case), STORED["kto"][name])
    assert trl_reference.odds_case()["loss"] == pytest.approx(STORED["odds"]["loss"], rel=1e-5)
