"""The evaluator asks as the evaluation does, within its time, and leaves the model as it was."""

import json
import math
import subprocess
import sys
import time

import pytest
import torch

from graftwork.grading.answers import AnswerFields
from graftwork.grading.metrics import METRICS, OF_ANSWERS
from graftwork.grading.rewards import RewardSpec
from graftwork.grading.settings import RewardSettings
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.load import load_base
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train.callbacks import EvaluationCallback, TrainingCallback, read_evaluations
from graftwork.train.engine import TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import EvalSettings, TrainSettings
from graftwork.train.worker_process import GradedAnswers, RewardedAnswers, make_evaluator

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
SETTINGS = TrainSettings(rank=4, epochs=2, batch_size=4, learning_rate=5e-2, checkpoint_every=3, threads=1)
REPLIES = (
    {"answer": "Two crates.", "citations": [1], "refused": False},
    {"answer": "", "citations": [], "refused": True},
)


@pytest.fixture(scope="module")
def template(tiny_base):
    return ChatTemplate.from_folder(tiny_base)


@pytest.fixture
def evaluator(template):
    return GradedAnswers(template, fields=AnswerFields(), max_new_tokens=6)


def make_rows(template, count, *, replies=REPLIES):
    rows = []
    for number in range(count):
        messages = (Message(role="user", content=f"[1] a source. Question {number}?"),)
        reply = replies[number % len(replies)]
        reply = reply if isinstance(reply, str) else json.dumps(reply)
        rendered = template.render(messages, reply)
        rows.append(
            Row(
                id=str(number),
                origin=Origin(file="log.jsonl", line=number + 1),
                messages=messages,
                reply=reply,
                tokens=tuple(rendered.tokens),
                trained_from=rendered.trained_from,
            )
        )
    return rows


def test_only_rows_that_the_metric_is_about_are_asked(template, evaluator):
    rows = make_rows(template, 6)
    assert [row.id for row in evaluator.choose(rows, metric="citation_correct", most=2)] == ["0", "2"]
    assert [row.id for row in evaluator.choose(rows, metric="json_valid", most=4)] == ["0", "1", "2", "3"]
    plain = make_rows(template, 2, replies=("no JSON",))
    assert evaluator.choose(plain, metric="refusal_correct", most=2) == []


def test_every_metric_of_answers_can_be_examined(tiny_base, template, evaluator):
    model, rows = load_base(tiny_base), make_rows(template, 3)
    assert set(METRICS) < set(OF_ANSWERS)
    for metric in OF_ANSWERS:
        chosen = evaluator.choose(rows, metric=metric, most=2)
        grades = evaluator.evaluate(model, chosen, metric=metric, seconds=60, progress=lambda: None)
        assert len(grades) == len(chosen)
        assert set(grades) <= {0.0, 1.0}
    assert evaluator.smaller_is_better("truncated")
    assert not evaluator.smaller_is_better("json_valid")


def test_the_time_cuts_off_cases_but_never_the_first(tiny_base, template, evaluator):
    model, rows = load_base(tiny_base), make_rows(template, 12)
    late = evaluator.evaluate(model, rows, metric="json_valid", seconds=1e-6, progress=lambda: None)
    assert len(late) == 1
    ticks = []

    def progress():
        """Time passes in the third batch."""
        ticks.append(1)
        if len(ticks) > 6 + 4 * 6:
            time.sleep(0.6)

    some = evaluator.evaluate(model, rows, metric="truncated", seconds=0.5, progress=progress)
    assert len(some) in (1, 5), "only whole batches count"


class Ruffled(TrainingCallback):
    """Before each step: the modes, attention and random state that training was given."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, engine, *, done, steps):
        self._model = engine.model
        engine.model.model.layers[0].train()
        torch.manual_seed(5)

    def on_step_begin(self, number, steps):
        model = self._model
        modes = tuple(module.training for module in model.modules())
        grads = tuple(parameter.requires_grad for parameter in model.parameters())
        state = torch.get_rng_state().numpy().tobytes()
        self.seen.append((modes, grads, model.config._attn_implementation, model.config.use_cache, state))


def run(tiny_base, template, folder, evaluator):
    torch.set_num_threads(1)
    model = load_base(tiny_base)
    engine = TrainingEngine(model, attach(model, SHAPE, seed=1), settings=SETTINGS)
    rows, ruffled = make_rows(template, 12), Ruffled()
    callbacks: list[TrainingCallback] = [ruffled]
    if evaluator:
        settings = EvalSettings(every=1, metric="json_valid", cases=6, keep_best=False)
        callbacks.append(EvaluationCallback(settings, rows, folder=folder, evaluator=evaluator))
    settings = SETTINGS.model_copy(update={"eval": EvalSettings(keep_best=False)})
    TrainingLoop(
        engine, EpochOrder(rows, settings=settings), RunContext(settings, folder), callbacks=callbacks
    ).run()
    return [step.loss for step in read_steps(folder)], engine.digest(), ruffled.seen


def test_a_run_that_is_asked_questions_has_the_losses_and_bytes_of_one_that_is_not(
    tiny_base, template, evaluator, tmp_path
):
    plain = run(tiny_base, template, tmp_path / "plain", None)
    asked = run(tiny_base, template, tmp_path / "asked", evaluator)
    assert asked == plain
    assert len(set(asked[2])) == 1, "nothing differs from step to step"
    assert [look.cases for look in read_evaluations(tmp_path / "asked")] == [6] * 6


def test_a_look_that_fails_leaves_the_model_as_it_was_too(tiny_base, template, evaluator):
    model, rows = load_base(tiny_base), make_rows(template, 2)
    model.train()
    before = model.config._attn_implementation

    def burst():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate(model, rows, metric="json_valid", seconds=9, progress=burst)
    assert model.training
    assert model.config._attn_implementation == before


def test_a_run_judged_by_its_loss_needs_no_examiner():
    class Job:
        eval_file = None

        class plan:  # noqa: N801
            train = {}

    assert make_evaluator(Job) is None


def test_the_process_starts_without_what_a_worker_lacks():
    script = (
        "import sys, graftwork.train.worker_process\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"sqlalchemy", "typer", "rich", "jinja2", "torch", "transformers", "pyarrow"}
    assert not heavy & set(done.stdout.split())


def rewarded(template, tmp_path, *, source="def some(case, text):\n    return 0.25\n", cases=5):
    (tmp_path / "own.py").write_text(source)
    held = [
        Case(
            id=f"c{number}",
            origin=Origin(file="held.jsonl", line=number + 1),
            messages=(Message(role="user", content=f"Question {number}?"),),
            reference="yes",
        )
        for number in range(cases)
    ]
    spec = RewardSpec(
        parts=(RewardSettings(metric="own.py:some"),), folder=str(tmp_path), fail_truncated=False
    )
    return RewardedAnswers(template, cases=held, spec=spec, max_new_tokens=4)


def test_held_out_cases_are_graded_by_the_rewards_of_the_run(tiny_base, template, tmp_path):
    evaluator = rewarded(template, tmp_path)
    chosen = evaluator.choose((), metric="reward", most=3)
    assert len(chosen) == 3
    grades = evaluator.evaluate(
        load_base(tiny_base), chosen, metric="reward", seconds=60, progress=lambda: None
    )
    assert grades == (0.25, 0.25, 0.25)
    assert not evaluator.smaller_is_better("reward")


def test_a_reward_that_fails_makes_an_evaluation_that_is_not_compared(tiny_base, template, tmp_path):
    evaluator = rewarded(template, tmp_path, source="def some(case, text):\n    raise OSError('down')\n")
    chosen = evaluator.choose((), metric="reward", most=2)
    grades = evaluator.evaluate(
        load_base(tiny_base), chosen, metric="reward", seconds=60, progress=lambda: None
    )
    assert all(math.isnan(grade) for grade in grades)


@pytest.mark.parametrize(
    ("during", "more", "problem"),
    [
        ({"metric": "reward"}, {}, "belong together"),
        ({"source": "held.jsonl"}, {}, "belong together"),
        ({"metric": "reward", "source": "held.jsonl"}, {"objective": "sft"}, "needs `objective: grpo`"),
        (
            {"metric": "reward", "source": "held.jsonl"},
            {"rollouts": {"environment": {"python": "e.py:E"}}},
            "single replies",
        ),
    ],
)
def test_rewards_on_held_out_cases_need_both_and_grpo(during, more, problem):
    settings = {"objective": "grpo", "rewards": [{"metric": "task_success"}], **more}
    with pytest.raises(ValueError, match=problem):
        TrainSettings.model_validate({**settings, "eval": {"every": 2, **during}})
