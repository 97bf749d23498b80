"""Reinforcement learning through the real worker: it learns, and kills anywhere change nothing."""

import weakref
from pathlib import Path

import pytest
import torch
from test_train_methods import Killed, make_job, train

from graftwork.files.disk import Journal
from graftwork.grading.reward_worker import make_context
from graftwork.grading.rewards import AnswerVerdict, grade_part
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train import worker
from graftwork.train.objectives.advantages import group_advantages, is_dead
from graftwork.train.rollouts.episodes import EpisodeJournal, SampledAnswer
from graftwork.train.rollouts.measures import PromptRecord, choose_prompts, measure_groups, pass_rates
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import RolloutSettings

REWARD = """
import json

def likes_e(case, text):
    return min(text.count("e") / 8, 1.0)

def likes_er(case, text):
    return min(text.count("er") / 4, 1.0)

def breaks(case, text, evidence):
    seed = sum(map(ord, text)) % 4
    if seed == 0:
        return float("nan")
    if seed == 1:
        return "good"
    if seed == 2:
        raise ValueError("no such luck")
    return 0.5 if len(text) % 2 else 0.25

"""


WHOLE = []
"""The run that nobody killed, made once: its outcome and its steps."""


def make_cases(count=6):
    return [
        Case(
            id=f"case{number}",
            origin=Origin(file="cases.jsonl", line=number + 1),
            messages=(Message(role="user", content=f"Write {number} words."),),
            reference="eeee",
        )
        for number in range(count)
    ]


def make_grpo_job(base, folder, *, reward="likes_e", seconds=60.0, **changes):
    project = folder.parent / "project"
    (project / "rewards").mkdir(parents=True, exist_ok=True)
    (project / "rewards" / "own.py").write_text(REWARD)
    metric = f"rewards/own.py:{reward}"
    settings = {
        "objective": "grpo",
        "learning_rate": 2e-2,
        "rewards": [{"metric": metric}],
        "rollouts": {"steps": 4, "prompts": 2, "num_generations": 4, "max_completion_length": 6},
        "reward_checks": {"preflight": False, "hacks": False, "decoys": 0, "seconds": seconds},
        "checkpoint_every": 2,
        **changes,
    }
    job = make_job(base, folder, method="lora", **settings)
    # A random model never ends its answers by itself.
    spec = {"parts": [{"metric": metric}], "seconds": seconds, "folder": "", "fail_truncated": False}
    named = job.plan.model_copy(update={"train": {**job.plan.train, "rewards": spec}})
    return job.model_copy(update={"plan": named, "project_folder": str(project)})


@pytest.fixture(autouse=True)
def _settled():
    yield
    torch.use_deterministic_algorithms(False)


class LocalGrader:
    """Grades in this process: starting children takes longer than these runs."""

    def __init__(self, spec):
        self._spec = spec
        self._context = make_context(spec)

    def grade_all(self, questions):
        for question in questions:
            (metric,) = [part.metric for part in self._spec.parts]
            grade = grade_part(metric, question.case, question.text, context=self._context, evidence={})
            yield AnswerVerdict(key=question.key, reward=grade, parts={metric: grade})

    def close(self):
        pass


@pytest.fixture
def local_grader(monkeypatch):
    monkeypatch.setattr("graftwork.grading.rewards.RewardRunner", LocalGrader)


@pytest.fixture
def run_training(monkeypatch):
    from train_samples import make_rows

    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: make_rows(8))
    original = worker.train
    monkeypatch.setattr(worker, "train", lambda job: original(job, cases=make_cases()))
    return train


def test_grpo_samples_grades_and_updates(tiny_base, tmp_path, local_grader, run_training):
    outcome = run_training(make_grpo_job(tiny_base, tmp_path / "run"))
    steps = read_steps(tmp_path / "run")
    assert outcome.steps == len(steps) == 4
    assert outcome.base_hash_before == outcome.base_hash_after
    journal = EpisodeJournal(tmp_path / "run")
    assert journal.batches() == [1, 2, 3, 4]
    for batch in journal.batches():
        answers, verdicts = journal.answers(batch), journal.verdicts(batch)
        assert len(answers) == len(verdicts) == 8
        assert all(len(answer.tokens) == len(answer.logprobs) for answer in answers)
    assert {"reward", "dead_groups", "entropy", "length", "kl", "pass@1"} <= set(steps[-1].measures)
    assert steps[0].measures["kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1].measures["kl"] > 0


@pytest.mark.parametrize("where", ["sampling", "grading", "update", "checkpoint"])
def test_killed_grpo_resumes_to_the_same_bytes_and_grades_nothing_twice(
    tiny_base, tmp_path, tmp_path_factory, local_grader, run_training, monkeypatch, where
):
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.loop import TrainingLoop
    from graftwork.train.rollouts.sampling import RolloutSampler

    if not WHOLE:
        folder = tmp_path_factory.mktemp("grpo") / "whole"
        WHOLE.append((run_training(make_grpo_job(tiny_base, folder)), read_steps(folder)))
    whole, steps = WHOLE[0]
    target, method, after = {
        "sampling": (RolloutSampler, "sample", 3),
        "grading": (EpisodeJournal, "write_verdict", 12),
        "update": (TrainingEngine, "apply", 3),
        "checkpoint": (TrainingLoop, "_save", 2),
    }[where]
    original, calls = getattr(target, method), []

    def die(self, *given, **named):
        calls.append(1)
        if len(calls) == after:
            raise Killed
        return original(self, *given, **named)

    job = make_grpo_job(tiny_base, tmp_path / "killed")
    monkeypatch.setattr(target, method, die)
    with pytest.raises(Killed):
        worker.train(job)
    monkeypatch.setattr(target, method, original)
    again = run_training(job)
    assert again.adapter_hash == whole.adapter_hash
    for path in (tmp_path / "killed" / "episodes").glob("*.verdicts.jsonl"):
        keys = [line["key"] for line in Journal(path).read()]
        assert len(keys) == len(set(keys))
    assert [step.loss for step in read_steps(Path(job.folder))] == [step.loss for step in steps]


def test_a_broken_reward_costs_its_answer_and_is_named(tiny_base, tmp_path, run_training):
    reward = "breaks"
    small = {"steps": 1, "prompts": 2, "num_generations": 4, "max_completion_length": 8}
    job = make_grpo_job(tiny_base, tmp_path / "run", reward=reward, rollouts=small)
    outcome = run_training(job)
    verdicts = EpisodeJournal(tmp_path / "run").verdicts(1)
    failed = [verdict for verdict in verdicts.values() if verdict.failed]
    assert failed
    assert all(verdict.reward is None for verdict in failed)
    assert outcome.measures_last["failed_rewards"] == len(failed)
    words = [line["message"] for line in Journal(tmp_path / "run" / "messages.jsonl").read()]
    assert any(f"rewards/own.py:{reward} failed on the answer" in word for word in words)


def test_a_prompt_beyond_the_positions_of_the_base_is_left_out_and_named(
    tiny_base, tmp_path, local_grader, monkeypatch
):
    first, *others = make_cases(3)
    long = first.model_copy(update={"messages": (Message(role="user", content="word " * 3000),)})
    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: [])
    rollouts = {
        "steps": 2,
        "prompts": 3,
        "num_generations": 2,
        "max_completion_length": 2,
        "source": "prompts.jsonl",
    }
    worker.train(make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts), cases=[long, *others])
    answers = EpisodeJournal(tmp_path / "run").answers(1)
    assert {answer.prompt for answer in answers} == {"case1", "case2"}
    words = [line["message"] for line in Journal(tmp_path / "run" / "messages.jsonl").read()]
    assert any("2,048 positions are left out: case0 (3,0" in word for word in words)


def test_sampled_log_probabilities_are_those_of_the_trainer(tiny_base, tmp_path, local_grader, run_training):
    """With two updates a batch the second one compares with what the sampler noted."""
    rollouts = {"steps": 1, "prompts": 2, "num_generations": 4, "max_completion_length": 8, "updates": 2}
    run_training(make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts, epochs=1))
    steps = read_steps(tmp_path / "run")
    assert len(steps) == 2
    assert steps[0].measures["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_mix_trains_on_supervised_rows_too(tiny_base, tmp_path, local_grader, run_training):
    mix = {"sft": 0.3, "decay": "to_zero"}
    run_training(make_grpo_job(tiny_base, tmp_path / "run", mix=mix))
    steps = read_steps(tmp_path / "run")
    assert [round(step.measures.get("share_sft", 0.0), 3) for step in steps] == [0.3, 0.2, 0.1, 0.0]
    assert "sft_loss" in steps[0].measures


def test_group_advantages_leave_out_answers_without_a_reward():
    assert group_advantages([1.0, None, 0.0]) == [0.5, None, -0.5]
    assert group_advantages([1.0, None]) == [0.0, None]
    scaled = group_advantages([1.0, 0.0, 1.0, 0.0], scale="group")
    assert scaled == pytest.approx([0.75**0.5, -(0.75**0.5)] * 2, rel=1e-3)


def test_advantages_by_the_deviation_are_those_of_trl():
    """TRL divides by the deviation of a sample, torch's default."""
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert group_advantages(rewards.tolist(), scale="group") == pytest.approx(expected.tolist(), rel=1e-5)


def test_dead_groups_are_those_without_a_difference():
    assert is_dead([0.5, 0.5, None])
    assert is_dead([None, 1.0])
    assert not is_dead([0.0, 1.0])


def test_pass_rates_count_answers_and_groups():
    assert pass_rates([[1.0, 0.0], [0.0, None]]) == (0.25, 0.5)


def test_prompts_are_revisited_by_uncertainty():
    names = [f"p{number}" for number in range(40)]
    history = {name: PromptRecord(16, 16 if number % 2 else 8) for number, name in enumerate(names)}
    drawn = [
        name for batch in range(50) for name in choose_prompts(names, history, count=8, seed=1, batch=batch)
    ]
    uncertain = sum(int(name[1:]) % 2 == 0 for name in drawn)
    assert uncertain > 0.8 * len(drawn)
    assert choose_prompts(names, history, count=8, seed=1, batch=3) == choose_prompts(
        names, history, count=8, seed=1, batch=3
    )
    assert len(set(choose_prompts(names, {}, count=40, seed=1, batch=1))) == 40


def test_measures_of_a_batch_leave_out_decoys():
    def pair(prompt, reward, decoy=False):
        answer = SampledAnswer(
            prompt=prompt, answer=0, tokens=(1, 2), logprobs=(-1.0, -3.0), text="x", decoy=decoy
        )
        return answer, AnswerVerdict(key="k", reward=reward, parts={"m": reward})

    found = measure_groups([[pair("a", 1.0), pair("a", 0.0)], [pair("c", 1.0, decoy=True)]])
    assert found["reward"] == 0.5
    assert found["reward/m"] == 0.5
    assert found["dead_groups"] == 0.0
    assert found["entropy"] == 2.0


def make_sampler(base, *, recorded):
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import make_trainable
    from graftwork.model.load import load_base
    from graftwork.train.rollouts.sampling import RolloutSampler, SamplingPasses

    model = load_base(base)
    shape = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
    learned = make_trainable(model, shape, seed=1)

    def train():
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in learned:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))

    settings = RolloutSettings(source="prompts.jsonl", prompts=3, num_generations=4, max_completion_length=12)
    sampler = RolloutSampler(
        model, settings=settings, seed=5, end_of_turn=2, decode=str, passes=SamplingPasses(recorded=recorded)
    )
    return sampler, train


def test_recorded_passes_that_stay_between_batches_write_what_the_updated_adapter_writes(tiny_base):
    from graftwork.train.rollouts.sampling import AskedPrompt

    prompts = [AskedPrompt(name, list(range(10 + at, 40 + 7 * at))) for at, name in enumerate("abc")]
    found = {}
    for recorded in (False, True):
        sampler, train = make_sampler(tiny_base, recorded=recorded)
        first = sampler.sample(0, prompts)
        train()
        found[recorded] = (first, sampler.sample(0, prompts))
        assert (sampler._decoder is not None) == recorded
    for plain, kept in zip(found[False], found[True], strict=True):
        assert [answer.tokens for answer in kept] == [answer.tokens for answer in plain]
        for ours, theirs in zip(kept, plain, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert [answer.tokens for answer in found[True][0]] != [answer.tokens for answer in found[True][1]]


class AlwaysRecorded:
    """Acts as on a card, where each row gets an adapter of its own, and computes each pass."""

    enabled = True

    def __init__(self, **_):
        pass

    def run(self, _key, compute, *, after=0):
        return compute()

    def forget(self):
        pass


def run_out_of_memory_at(number, monkeypatch):
    """At this step of decoding; the steps that were counted."""
    from graftwork.model.generate.decoder import SlotDecoder

    original, calls = SlotDecoder.step, []

    def step(decoder):
        calls.append(1)
        if len(calls) == number:
            raise MemoryError
        original(decoder)

    monkeypatch.setattr(SlotDecoder, "step", step)
    return calls


def test_recorded_batches_leave_the_adapter_acting_whatever_happens(tiny_base, monkeypatch):
    from graftwork.model.adapters.lora import LoraLinear, active_adapter
    from graftwork.train.rollouts.sampling import AskedPrompt

    prompts = [AskedPrompt(name, list(range(10 + at, 40 + 7 * at))) for at, name in enumerate("abc")]
    plain, train_plain = make_sampler(tiny_base, recorded=False)
    plain.sample(0, prompts)
    train_plain()
    expected = [answer.tokens for answer in plain.sample(1, prompts)]
    monkeypatch.setattr("graftwork.model.generate.decoder.GraphRecorder", AlwaysRecorded)
    sampler, train = make_sampler(tiny_base, recorded=True)
    acting = active_adapter(sampler._model)
    sampler.sample(0, prompts)
    train()
    assert active_adapter(sampler._model) == acting is not None
    assert [answer.tokens for answer in sampler.sample(1, prompts)] == expected
    calls = run_out_of_memory_at(3, monkeypatch)
    assert [answer.tokens for answer in sampler.sample(1, prompts)] == expected
    calls.clear()
    again, train_again = make_sampler(tiny_base, recorded=True)
    train_again()
    monkeypatch.setattr("graftwork.train.rollouts.sampling.is_exhaustion", lambda _error: False)
    with pytest.raises(MemoryError):
        again.sample(0, prompts)
    assert again._decoder is None
    for model in (sampler._model, again._model):
        assert active_adapter(model) == acting
        assert all(m.row_change is None for m in model.modules() if isinstance(m, LoraLinear))


class Activations:
    """What a pass has in memory until its frame is gone."""


def test_a_recorded_pass_without_memory_is_freed_before_the_answers_are_written_again(tiny_base, monkeypatch):
    from graftwork.model.generate.decoder import SlotDecoder
    from graftwork.train.rollouts.sampling import AskedPrompt

    original, failed = SlotDecoder.step, []

    def step(decoder):
        if not failed:
            activations = Activations()
            failed.append(weakref.ref(activations))
            raise MemoryError
        assert failed[0]() is None
        original(decoder)

    monkeypatch.setattr("graftwork.model.generate.decoder.GraphRecorder", AlwaysRecorded)
    monkeypatch.setattr(SlotDecoder, "step", step)
    sampler, _ = make_sampler(tiny_base, recorded=True)
    assert len(sampler.sample(0, [AskedPrompt("a", list(range(10, 40)))])) == 4
    assert failed


@pytest.mark.parametrize("recorded", [False, True])
def test_decoys_take_no_more_memory_than_was_planned(tiny_base, monkeypatch, recorded):
    """They join the first batch besides its prompts, and the plan counts the rows of the prompts alone."""
    from graftwork.model.generate.decoder import SlotDecoder
    from graftwork.train.rollouts.sampling import AskedPrompt

    rows, step = [], SlotDecoder.step

    def count(decoder):
        step(decoder)
        rows.append((decoder.running, decoder._cache.slots))

    monkeypatch.setattr(SlotDecoder, "step", count)
    sampler, _ = make_sampler(tiny_base, recorded=recorded)
    prompts = [
        AskedPrompt(name, list(range(10 + at, 40 + at)), decoy=at > 2) for at, name in enumerate("abcde")
    ]
    answers = sampler.sample(0, prompts)
    assert [answer.prompt for answer in answers] == [name for name in "abcde" for _ in range(4)]
    assert max(running for running, _ in rows) == 3 * 4
    assert max(slots for _, slots in rows) <= 16


def test_memory_that_runs_out_for_recorded_passes_costs_the_recordings_and_no_answer(tiny_base, monkeypatch):
    from graftwork.train.rollouts.sampling import AskedPrompt

    prompts = [AskedPrompt(name, list(range(10, 40))) for name in "ab"]
    plain, _ = make_sampler(tiny_base, recorded=False)
    expected = [answer.tokens for answer in plain.sample(0, prompts)]
    sampler, _ = make_sampler(tiny_base, recorded=True)
    run_out_of_memory_at(3, monkeypatch)
    assert [answer.tokens for answer in sampler.sample(0, prompts)] == expected
    assert sampler._decoder is None
