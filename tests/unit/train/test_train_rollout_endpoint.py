"""Rollouts from an endpoint: tokens as sampled, the mismatch of probabilities measured and masked."""

import math
from pathlib import Path

import pytest
from completions_server import CompletionsServer, sample_from
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_train_rollouts import local_grader, make_grpo_job, run_training  # noqa: F401

from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.rollouts.episodes import EpisodeJournal
from graftwork.train.rollouts.sampling import AskedPrompt, EndpointSampler, correct_mismatch, read_choice
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import RolloutSettings, TrainSettings
from graftwork.train.worker import job_settings

END = 2


def make_sampler(server, folder, *, loads=True, **changes):
    settings = RolloutSettings(
        prompts=1,
        num_generations=3,
        max_completion_length=4,
        endpoint={"url": server.url, "model": "base", **changes},
    )
    saved = []
    sampler = EndpointSampler(
        settings.endpoint,
        settings=settings,
        seed=1,
        end_of_turn=END,
        decode=lambda tokens: " ".join(map(str, tokens)),
        folder=folder,
        save=(lambda path: (path.mkdir(parents=True), saved.append(path))) if loads else None,
    )
    return sampler, saved


def echo(prompt, body):
    return [prompt[-1] + 1, END], [-0.5, -0.25]


@pytest.mark.parametrize("form", ["token_ids", "tokens"])
def test_replies_keep_the_tokens_and_log_probabilities_of_the_server(tmp_path, form):
    with CompletionsServer(echo, form=form) as server:
        sampler, _ = make_sampler(server, tmp_path / "run", loads=False)
        answers = sampler.sample(1, [AskedPrompt("p", [5, 6])])
        again = sampler.sample(1, [AskedPrompt("p", [5, 6])])
    assert [answer.tokens for answer in answers] == [(7, END)] * 3
    assert answers[0].logprobs == (-0.5, -0.25)
    assert (answers[0].text, answers[0].truncated) == ("7", False)
    assert len({body["seed"] for body in server.requests[:3]}) == 3
    assert again == answers


def test_each_batch_is_answered_by_its_own_adapter(tmp_path):
    with CompletionsServer(echo) as server:
        sampler, saved = make_sampler(server, tmp_path / "run")
        for batch in (1, 2):
            sampler.sample(batch, [AskedPrompt("p", [5, 6])])
    kinds = [kind for kind, _, _ in server.loaded]
    assert kinds == ["load_lora_adapter", "load_lora_adapter", "unload_lora_adapter"]
    first, second, old = (name for _, name, _ in server.loaded)
    assert first == old != second
    assert {body["model"] for body in server.requests[3:]} == {second}
    assert [path.exists() for path in saved] == [False, True]


def test_a_busy_server_is_asked_again_and_a_broken_one_is_named(tmp_path):
    with CompletionsServer(echo, fail_first=2) as server:
        sampler, _ = make_sampler(server, tmp_path / "run", loads=False, concurrency=1)
        assert len(sampler.sample(1, [AskedPrompt("p", [5, 6])])) == 3
    with CompletionsServer(echo, fail_first=99) as server:
        sampler, _ = make_sampler(server, tmp_path / "run", loads=False, concurrency=1)
        with pytest.raises(EnvironmentFailure, match="does not answer /completions") as refused:
            sampler.sample(1, [AskedPrompt("p", [5, 6])])
    assert "503" in refused.value.why


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"text": "hello", "finish_reason": "stop"}, "no token ids"),
        ({"token_ids": [5], "logprobs": {"token_logprobs": []}, "finish_reason": "length"}, "not belong"),
        (
            {"token_ids": [5], "logprobs": {"token_logprobs": [math.nan]}, "finish_reason": "length"},
            "not belong",
        ),
        ({"token_ids": [5], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "stop"}, "end of turn"),
    ],
)
def test_an_endpoint_without_tokens_and_log_probabilities_is_refused(choice, why):
    with pytest.raises(UserError, match="cannot serve rollouts") as refused:
        read_choice({"choices": [choice]}, end=END)
    assert why in refused.value.why


def make_settings(**changes):
    endpoint = {"url": "http://one:8000/v1", "model": "base", **changes.pop("endpoint", {})}
    given = {"objective": "grpo", "rewards": [{"metric": "task_success"}], **changes}
    return TrainSettings.model_validate({**given, "rollouts": {"endpoint": endpoint}})


def test_the_server_may_move_and_the_run_stays_the_same():
    moved = {"url": "https://two/v1", "api_key_env": "KEY", "concurrency": 2}
    learned = make_settings().what_is_learned()
    assert make_settings(endpoint=moved).what_is_learned() == learned
    assert make_settings(endpoint={"model": "other"}).what_is_learned() != learned
    assert make_settings(endpoint=moved).endpoint_access() == moved


def test_a_worker_gets_the_address_that_the_plan_does_not_hold(tiny_base, tmp_path):
    rollouts = {"endpoint": {"url": "https://two/v1", "model": "base", "concurrency": 9}}
    job = make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts)
    assert "two" not in job.plan.to_json()
    found = job_settings(job).rollouts.endpoint
    assert (found.url, found.model, found.concurrency) == ("https://two/v1", "base", 9)


@pytest.mark.parametrize(
    "endpoint", [{"url": "https://me:secret@host/v1"}, {"url": "host"}, {"api_key_env": "sk-abc.def"}]
)
def test_a_key_in_the_settings_of_the_endpoint_is_refused(endpoint):
    with pytest.raises(ValidationError):
        make_settings(endpoint=endpoint)


def test_an_endpoint_is_refused_where_all_weights_are_trained():
    with pytest.raises(ValidationError, match="would stay those of the start"):
        make_settings(method="full")


def make_row(count, factors=None):
    return TrainingSample.model_construct(tokens=tuple(range(count + 1)), trained_from=1, factors=factors)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=12), st.floats(1.1, 9))
def test_factors_are_ratios_within_the_limit_and_zero_beyond(pairs, most):
    sampled, now = zip(*pairs, strict=True)
    (row,), measures = correct_mismatch([make_row(len(pairs))], [sampled], [now], most=most)
    for factor, theirs, ours in zip(row.factors, sampled, now, strict=True):
        assert factor == 0 or 1 / most - 1e-6 <= factor <= most + 1e-6
        if abs(ours - theirs) < math.log(most):
            assert factor == pytest.approx(math.exp(ours - theirs))
    assert measures["masked"] == sum(factor == 0 for factor in row.factors) / len(pairs)
    assert measures["mismatch_kl"] >= -1e-9


def test_tokens_that_nobody_sampled_stay_out_of_the_mismatch():
    rows = [make_row(3, (1.0, 0.0, 1.0))]
    (row,), measures = correct_mismatch(rows, [(-1.0, 0.0, -1.0)], [(-1.0, -9.0, -1.0)], most=3.0)
    assert row.factors == (1.0, 0.0, 1.0)
    assert measures["mismatch"] == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.02])
def test_a_run_measures_how_far_the_server_is_from_the_trainer(
    tiny_base,
    tmp_path,
    local_grader,  # noqa: F811
    run_training,  # noqa: F811
    temperature,
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    with CompletionsServer(sample_from(model, temperature=temperature)) as server:
        endpoint = {"url": server.url, "model": "base", "concurrency": 1}
        rollouts = {
            "steps": 1,
            "prompts": 1,
            "num_generations": 4,
            "max_completion_length": 5,
            "endpoint": endpoint,
        }
        run_training(make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts))
    (step,) = read_steps(tmp_path / "run")
    answers = EpisodeJournal(tmp_path / "run").answers(1)
    assert all(len(answer.tokens) == len(answer.logprobs) == 5 for answer in answers)
    assert server.loaded[0][2].startswith(str(tmp_path))
    assert Path(server.loaded[0][2], "adapter_model.safetensors").exists()
    if temperature == 1.0:
        assert step.measures["mismatch"] < 1e-4
        assert step.measures["masked"] == 0.0
    else:
        assert step.measures["mismatch"] > 1.0
        assert step.measures["masked"] > 0.5
