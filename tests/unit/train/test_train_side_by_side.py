"""Side by side on one base: each run learns what it would have learned alone; and who may share is pure."""

import random
from types import SimpleNamespace

import pytest
import torch
from sample_rows import make_row
from test_train_gpu import make_tuning

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import base_digest, load_base
from graftwork.records.plan import PlainStep
from graftwork.train.engine import TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.multi_run import BaseCache, choose_side_by_side
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import TrainSettings
from graftwork.train.side_by_side import train_side_by_side

RUNS = [
    (
        AdapterShape(rank=4, alpha=8, targets=("q_proj", "down_proj"), layers=(0, 1)),
        TrainSettings(epochs=2, batch_size=4, learning_rate=5e-2, checkpoint_every=3, threads=1),
        16,
    ),
    (
        AdapterShape(rank=2, alpha=4, targets=("q_proj", "v_proj"), layers=(1,), kind="dora"),
        TrainSettings(epochs=1, batch_size=3, learning_rate=1e-2, checkpoint_every=3, threads=1, seed=3),
        9,
    ),
]


def make_rows(count, seed):
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        prompt = [chance.randrange(100, 400) for _ in range(chance.randrange(5, 12))]
        rows.append(make_row(str(number), (*prompt, 7, 8, 9, 10 + number % 3, 2), len(prompt)))
    return rows


def train_run(place, model, folder, strategy=None):
    shape, settings, count = RUNS[place]
    parameters = attach(model, shape, seed=settings.seed)
    engine = TrainingEngine(model, parameters, settings=settings, strategy=strategy)
    TrainingLoop(
        engine,
        EpochOrder(make_rows(count, place), settings=settings),
        RunContext(settings, folder / str(place)),
    ).run()
    return engine


def test_runs_side_by_side_have_the_losses_and_the_adapters_of_runs_alone(tiny_base, tmp_path):
    torch.set_num_threads(1)
    alone = [train_run(place, load_base(tiny_base), tmp_path / "alone") for place in range(len(RUNS))]
    base = load_base(tiny_base)
    before = base_digest(base)
    engines = {}

    def work_on(place):
        def work(load, strategy):
            engines[place] = train_run(place, load(None), tmp_path / "abreast", strategy)

        return work

    party = train_side_by_side(base, [work_on(place) for place in range(len(RUNS))])

    steps = [len(read_steps(tmp_path / "alone" / str(place))) for place in range(len(RUNS))]
    assert party.passes == max(steps) > min(steps)  # the shorter run left, the longer went on
    for place in range(len(RUNS)):
        mine, theirs = (read_steps(tmp_path / way / str(place)) for way in ("alone", "abreast"))
        assert [step.loss for step in theirs] == pytest.approx([step.loss for step in mine], rel=1e-4)
        learned, expected = engines[place].learned(), alone[place].learned()
        assert learned.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(learned[name], tensor, rtol=1e-3, atol=1e-4)
    assert base_digest(base) == before


def test_a_run_that_fails_leaves_and_the_others_go_on(tiny_base, tmp_path):
    done = []

    def fail(load, strategy):
        load(None)
        raise ValueError("broken")

    def work(load, strategy):
        train_run(1, load(None), tmp_path, strategy)
        done.append(True)

    with pytest.raises(ValueError, match="broken"):
        train_side_by_side(load_base(tiny_base), [fail, work])
    assert done == [True]


def test_an_error_in_the_common_pass_reaches_every_run(tiny_base, tmp_path, monkeypatch):
    from graftwork.train import side_by_side

    def refuse(_model, _batch):
        raise RuntimeError("no memory")

    monkeypatch.setattr(side_by_side, "eager_logits", refuse)
    seen = []

    def work_on(place):
        def work(load, strategy):
            try:
                train_run(place, load(None), tmp_path, strategy)
            except RuntimeError:
                seen.append(place)

        return work

    train_side_by_side(load_base(tiny_base), [work_on(0), work_on(1)])
    assert sorted(seen) == [0, 1]


def make_job(folder, method="lora", tuning=None):
    """As much of a job as a held base looks at."""
    plan = SimpleNamespace(dtype="float32", method=method, device=SimpleNamespace(kind="cpu"), tuning=tuning)
    return SimpleNamespace(base_folder=str(folder), plan=plan)


def test_a_held_base_is_loaded_once_and_handed_out_as_it_was_loaded(tiny_base):
    held = BaseCache(lambda job: load_base(tiny_base))
    first = held.take(make_job(tiny_base))
    names, digest = [name for name, _ in first.named_modules()], base_digest(first)
    attach(first, RUNS[0][0], seed=1)
    first.model.layers[0].forward = lambda *_: None
    again = held.take(make_job(tiny_base))
    assert again is first
    assert held.loads == 1
    assert [name for name, _ in again.named_modules()] == names
    assert base_digest(again) == digest
    assert "forward" not in again.model.layers[0].__dict__
    # Another type of weights, or a method that changes them, is another base.
    held.take(make_job(tiny_base, method="full"))
    held.take(make_job(tiny_base, method="full"))
    assert held.loads == 3


def test_a_base_in_another_form_is_another_base(tiny_base):
    held = BaseCache(lambda job: load_base(tiny_base))
    whole, eight = make_tuning(), make_tuning(form="eight", head="eight")
    for tuning in (None, whole, eight, eight):
        held.take(make_job(tiny_base, tuning=tuning))
    assert held.loads == 3


def test_a_held_base_whose_weights_were_exchanged_is_loaded_again(tiny_base):
    held = BaseCache(lambda job: load_base(tiny_base))
    first = held.take(make_job(tiny_base))
    layer = first.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)
    assert held.take(make_job(tiny_base)) is not first
    assert held.loads == 2


def planned(
    folder,
    *,
    asked="on",
    peak=1.0,
    start=None,
    dtype="float32",
    method="lora",
    tokens=100,
    steps=1,
    tuning=None,
    plain=None,
):
    """As much of a job as the choice looks at."""
    plan = SimpleNamespace(
        tuning=tuning,
        plain=plain,
        dtype=dtype,
        train={"settings": {"method": method, "batch_size": 4}},
        device=SimpleNamespace(kind="cpu", memory_gib=4.0),
        total_parameters=SimpleNamespace(value=2**27),  # half a GiB in float32
        peak_memory_gib=SimpleNamespace(high=peak),
        tokens=SimpleNamespace(value=tokens),
        steps=SimpleNamespace(value=steps),
    )
    run = {"side_by_side": asked}
    return SimpleNamespace(
        base_folder="base",
        folder=folder,
        start_adapter=start,
        plan=plan,
        run=run,
        crew={"strategy": "single"},
    )


def test_only_who_was_asked_shares_and_nobody_waits_for_one_of_its_group():
    jobs = [
        planned("runs/main"),
        planned("runs/a", start="runs/main/adapter"),
        planned("runs/b"),
        planned("runs/c", start="runs/main/adapter"),
        planned("runs/d", asked="off"),
        planned("runs/e", asked="auto"),
        planned("runs/f", method="qlora"),
        planned("runs/g", dtype="bfloat16"),
        planned("runs/h", tuning="of a card"),
    ]
    assert choose_side_by_side(jobs) == ((0, 2), (1, 3))


def test_a_group_takes_no_more_memory_than_there_is():
    # The base counts once: 0.5 GiB, and 1.0 for each; 3.6 GiB may be filled.
    jobs = [planned(f"runs/{number}", peak=1.5) for number in range(5)]
    assert choose_side_by_side(jobs) == ((0, 1, 2), (3, 4))
    assert choose_side_by_side([planned("runs/x", peak=3.0), planned("runs/y", peak=3.0)]) == ()


def test_a_run_that_needs_several_passes_per_step_shares_no_step():
    all_at_once, few, again = (
        PlainStep(micro_rows=rows, checkpointed=computed_again, peak_gib=1.0)
        for rows, computed_again in ((4, False), (2, False), (4, True))
    )
    jobs = [planned(f"runs/{at}", plain=one) for at, one in enumerate((all_at_once, few, again, None))]
    assert choose_side_by_side(jobs) == ((0, 3),)
