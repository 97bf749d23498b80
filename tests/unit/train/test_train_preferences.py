"""Preferences through the real worker: pairs are learned, margins are reported, kills change nothing."""

import math
from pathlib import Path

import pytest
import torch
from test_train_loop import make_rows
from test_train_methods import Killed, make_job, train

from graftwork.files.disk import Journal
from graftwork.model.chat.renderer import CannotProve
from graftwork.records.errors import UserError
from graftwork.train import run_source, worker
from graftwork.train.objectives.pairs import PairOrder, describe_pairs, make_pairs
from graftwork.train.objectives.preference import OddsRatioPreference
from graftwork.train.objectives.samples import LOSS_MEASURE, scale_pairs
from graftwork.train.run_folder import read_steps
from graftwork.train.run_source import REFERENCE, add_reference
from graftwork.train.settings import PreferenceSettings, TrainSettings

DPO = {"objective": "dpo", "learning_rate": 1e-2, "epochs": 3, "preferences": {"beta": 0.5, "sft": 0.2}}


def make_pair_rows(count=8):
    return [
        row.model_copy(update={"reply": f"good {row.id}", "rejected": f"bad {row.id}"})
        for row in make_rows(count)
    ]


def render(row, _reply):
    return (*row.tokens[: row.trained_from], 17, 18, 19, 2), row.trained_from


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: make_pair_rows())
    monkeypatch.setattr(run_source, "make_render", lambda _job: render)
    yield
    torch.use_deterministic_algorithms(False)


def test_dpo_learns_the_order_of_pairs_and_reports_margins(tiny_base, tmp_path):
    outcome = train(make_job(tiny_base, tmp_path / "run", method="lora", **DPO))
    assert outcome.measures_first["margin"] == pytest.approx(0.0, abs=1e-5)
    assert outcome.measures_last["margin"] > 1.0
    assert outcome.measures_last["accuracy"] == 1.0
    # The loss of the order falls from log 2 to nearly 0; the rest is the supervised term.
    assert outcome.final_loss < outcome.first_loss - 0.5
    assert outcome.base_hash_before == outcome.base_hash_after


def test_orpo_learns_the_order_without_a_reference(tiny_base, tmp_path):
    settings = {**DPO, "objective": "orpo"}
    outcome = train(make_job(tiny_base, tmp_path / "run", method="lora", **settings))
    assert outcome.measures_last["margin"] > outcome.measures_first["margin"] + 0.5
    assert not (tmp_path / "run" / REFERENCE).exists()


@pytest.mark.parametrize("where", ["reference", "update"])
def test_killed_dpo_resumes_to_the_same_bytes(tiny_base, tmp_path, monkeypatch, where):
    from graftwork.train.engine import TrainingEngine

    whole = train(make_job(tiny_base, tmp_path / "whole", method="lora", **DPO))
    method = {"reference": "log_probabilities", "update": "apply"}[where]
    original, calls = getattr(TrainingEngine, method), []

    def die(self, given):
        calls.append(1)
        if len(calls) == (1 if where == "reference" else 5):
            raise Killed
        return original(self, given)

    job = make_job(tiny_base, tmp_path / "killed", method="lora", **DPO)
    monkeypatch.setattr(TrainingEngine, method, die)
    with pytest.raises(Killed):
        worker.train(job)
    monkeypatch.setattr(TrainingEngine, method, original)
    again = train(job)
    assert again.adapter_hash == whole.adapter_hash
    assert [step.loss for step in read_steps(Path(job.folder))] == [
        step.loss for step in read_steps(tmp_path / "whole")
    ]


def test_reference_is_computed_once(tiny_base, tmp_path):
    job = make_job(tiny_base, tmp_path / "run", method="lora", **DPO)
    train(job)
    lines = Journal(tmp_path / "run" / REFERENCE).read()
    assert len(lines) == len({line["row"] for line in lines}) == 16


class NoisyEngine:
    """Its last bits depend on how many rows share a pass, as those of kernels may."""

    def log_probabilities(self, rows):
        return [torch.full((2,), -1.0 - len(rows) / 1e3) for _ in rows]


def test_a_reference_that_is_known_is_not_computed_differently_later(tmp_path):
    pairs, _ = make_pairs(make_pair_rows(3), render)
    samples = [row for pair in pairs for row in pair]
    first = add_reference(samples[:2], NoisyEngine(), folder=tmp_path)
    both = add_reference(samples, NoisyEngine(), folder=tmp_path)
    assert both[:2] == first
    again = add_reference(samples[:2], NoisyEngine(), folder=tmp_path)
    assert again == first
    lines = Journal(tmp_path / REFERENCE).read()
    assert len(lines) == len({line["row"] for line in lines})


def test_pairs_that_say_nothing_are_left_out_and_counted():
    rows = make_pair_rows(6)
    rows[1] = rows[1].model_copy(update={"rejected": None})
    rows[2] = rows[2].model_copy(update={"rejected": f" {rows[2].reply.upper()} "})
    rows[3] = rows[3].model_copy(update={"reply": rows[0].reply, "rejected": rows[0].rejected})
    rows[4] = rows[4].model_copy(update={"reply": rows[5].rejected, "rejected": rows[5].reply})
    pairs, left_out = make_pairs(rows, render)
    assert [pair.chosen.id for pair in pairs] == ["0"]
    assert left_out == {"without": 1, "same": 1, "repeated": 1, "reversed": 2}
    assert any("chosen reply is longer" in note for note in describe_pairs(pairs, left_out))


def test_rejected_replies_that_cannot_be_trained_on_are_left_out_and_counted():
    rows = make_pair_rows(3)
    longest = max(len(row.tokens) for row in rows)

    def render_two(row, reply):
        if row.id == "0":
            raise CannotProve("the template changes it")
        return ((1,) * (longest + 1), 1) if row.id == "1" else render(row, reply)

    pairs, left_out = make_pairs(rows, render_two)
    assert [pair.chosen.id for pair in pairs] == ["2"]
    assert left_out == {"unrendered": 1, "too_long": 1}


def test_the_loss_of_orpo_contains_its_supervised_term():
    pairs, _ = make_pairs(make_pair_rows(2), render)
    rows = scale_pairs(pairs)
    logps = [torch.full((len(row.tokens) - row.trained_from,), -2.0) for row in rows]
    measured = OddsRatioPreference(PreferenceSettings(beta=0.5)).measure(rows, logps)
    # Equal log-probabilities: the odds ratio adds β log 2 to the mean loss of the chosen replies.
    assert measured[LOSS_MEASURE].mean() == pytest.approx(2.0 + 0.5 * math.log(2), rel=1e-5)


@pytest.mark.parametrize("certain", [("chosen",), ("rejected",), ("chosen", "rejected")])
def test_replies_that_are_certain_do_not_end_orpo(certain):
    """Short replies that are learned by heart have a probability of 1 in 32 bits, and so infinite odds."""
    pairs, _ = make_pairs(make_pair_rows(2), render)
    rows = scale_pairs(pairs)
    logps = [
        torch.full((len(row.tokens) - row.trained_from,), 0.0 if row.part in certain else -2.0)
        for row in rows
    ]
    objective = OddsRatioPreference(PreferenceSettings(beta=0.5))
    assert all(bool(weights.isfinite().all()) for weights in objective.weights(rows, lambda: logps))
    measured = objective.measure(rows, logps)
    assert all(bool(values.isfinite().all()) for values in measured.values())


def test_a_dataset_without_pairs_is_refused(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: make_rows())
    with pytest.raises(UserError, match="no training row has a rejected reply"):
        worker.train(make_job(tiny_base, tmp_path / "run", method="lora", **DPO))


def test_pair_order_keeps_pairs_whole_and_in_every_epoch():
    pairs, _ = make_pairs(make_pair_rows(7), render)
    order = PairOrder(pairs, settings=TrainSettings(objective="dpo", batch_size=3, epochs=2))
    seen = [row for step in range(1, order.steps + 1) for row in order.batch(step)]
    assert len(seen) == order.rows_before(order.steps) == 2 * 2 * 7
    assert sum(row.part == "chosen" for row in seen) == 14
    for step in range(1, order.steps + 1):
        batch = order.batch(step)
        assert sum(row.scale for row in batch if row.part == "chosen") == pytest.approx(1.0)
