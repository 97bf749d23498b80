"""The true worker on a card: it learns, it is killed, and it ends with the same bytes.

Needs a GPU of Ampere or later: `make test-gpu`.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.files.dataset import read_rows
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.train.run_folder import read_steps

pytestmark = pytest.mark.gpu
NOISE = 0.02
"""Of a loss: kernels of a card add up in another order each time."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The demo's rows, prepared."""
    from graftwork.api.project import open_project

    example = Path(__file__).parents[2] / "examples" / "cited_answers"
    return Path(open_project(example).prepare().folder)


def make_job(base, dataset, folder, *, limit_gib=8.0, compiled=False, recorded=False, **changes):
    from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.probe import probe_device
    from graftwork.model.shape import adapter_parameters, read_shape
    from graftwork.plan.catalog.hardware import default_rates
    from graftwork.plan.estimate import PlanInputs, make_plan
    from graftwork.plan.settings import PlanSettings
    from graftwork.records.plan import Workload
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    values = {"rank": 16, "alpha": 32, "batch_size": 8, "learning_rate": 2e-3, "max_rows": 96}
    settings = TrainSettings(**{**values, "checkpoint_every": 5, **changes})
    shape = read_shape(base)
    layers = tuple(range(shape.layers))
    adapter = AdapterShape(rank=16, alpha=32, targets=ALL_LINEARS, layers=layers, kind="lora")
    lengths = tuple(len(row.tokens) for row in read_rows(dataset, "train"))
    load = Workload(
        lengths=lengths,
        trained_tokens=1000,
        batch_size=8,
        epochs=2,
        rank=16,
        targets=ALL_LINEARS,
        adapted_layers=len(layers),
    )
    request = TuningRequest(
        method=settings.method,
        adapted=len(layers),
        trainable=adapter_parameters(shape, rank=16, targets=ALL_LINEARS, layers=len(layers)),
        step_tokens=1600,
        longest=max(lengths),
        eight=settings.fp8 == "on",
        compile="on" if compiled else "off",
    )
    tuning = choose_tuning(shape, request, limit_gib=limit_gib, rates=default_rates())
    plan = make_plan(
        PlanInputs(
            base="smollm2",
            base_fingerprint="b",
            dataset_hash="d",
            shape=shape,
            work=load,
            device=probe_device(),
            settings=PlanSettings(),
            train={"settings": settings.what_is_learned(), "adapter": adapter.model_dump(mode="json")},
            dtype="bfloat16",
            tuning=tuning.model_copy(update={"recorded": recorded}),
        )
    )
    folder.mkdir(parents=True)
    job = TrainJob(
        run_id=folder.name,
        folder=str(folder),
        base_folder=str(base),
        dataset_folder=str(dataset),
        plan=plan,
        run=settings.run.model_dump(mode="json"),
        keeping=settings.keeping(),
    )
    (folder / "job.json").write_text(job.to_json())
    return folder


def start(folder):
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "graftwork.train.worker", str(folder / "job.json")],
            stdout=log,
            stderr=log,
        )


def finish(folder):
    code = start(folder).wait(timeout=600)
    assert code == 0, (folder / "worker.log").read_text()[-3000:]
    return TrainOutcome.from_json((folder / "outcome.json").read_bytes())


def losses(folder):
    return [step.loss for step in read_steps(folder)]


@pytest.mark.parametrize(
    ("method", "fp8", "how"),
    [
        ("lora", "off", {}),
        ("lora", "off", {"recorded": True}),
        ("lora", "on", {"recorded": True}),
        ("lora", "on", {"compiled": True}),
        ("qlora", "off", {"recorded": True}),
    ],
)
def test_gpu_training_learns_in_every_weight_format(embedded_base, dataset, tmp_path, method, fp8, how):
    folder = make_job(Path(embedded_base.folder), dataset, tmp_path / "run", method=method, fp8=fp8, **how)
    outcome = finish(folder)
    assert outcome.validation_loss_after < 0.7 * outcome.validation_loss_before
    assert outcome.base_hash_before == outcome.base_hash_after
    assert outcome.peak_memory_gib <= 8.0


def test_eight_bits_learn_what_sixteen_learn(embedded_base, dataset, tmp_path):
    base = Path(embedded_base.folder)
    whole = finish(make_job(base, dataset, tmp_path / "whole", fp8="off"))
    eight = finish(make_job(base, dataset, tmp_path / "eight", fp8="on"))
    assert eight.validation_loss_after == pytest.approx(whole.validation_loss_after, rel=0.05)


def test_recorded_steps_have_the_losses_of_plain_ones(embedded_base, dataset, tmp_path):
    base = Path(embedded_base.folder)
    finish(make_job(base, dataset, tmp_path / "plain", fp8="off"))
    finish(make_job(base, dataset, tmp_path / "recorded", fp8="off", recorded=True))
    assert losses(tmp_path / "recorded") == pytest.approx(losses(tmp_path / "plain"), rel=NOISE)


@pytest.mark.parametrize("deterministic", ["auto", "on"])
def test_killed_it_ends_with_the_same_bytes(embedded_base, dataset, tmp_path, deterministic):
    """Rows of different lengths attend by kernels that add up in one order, whatever is asked for."""
    base, how = Path(embedded_base.folder), {"fp8": "on", "recorded": True, "deterministic": deterministic}
    whole = finish(make_job(base, dataset, tmp_path / "whole", **how))
    folder = make_job(base, dataset, tmp_path / "cut", **how)
    worker = start(folder)
    while worker.poll() is None and len(losses(folder)) < 12:
        pass
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    resumed = finish(folder)
    assert resumed.restarts == 1
    assert losses(folder) == losses(tmp_path / "whole")
    assert resumed.adapter_hash == whole.adapter_hash
