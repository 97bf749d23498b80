"""Answers are kept by what was asked: the same question to the same subject is never paid for twice."""

import pytest
from gate_samples import new_case
from stand_in_engine import StandInEngine

from graftwork.evaluate.ask.answers import (
    CaseBatch,
    KeptAnswers,
    answer_key,
    forget_answers,
    read_answers,
    repeats_of,
)
from graftwork.evaluate.ask.runner import CaseRunner, seed_of
from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.subjects import answers_of_log, generation_of_log
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Endpoint, EvalJob


def make_case(number, *, name=None, reference="yes", duration_ms=None):
    return new_case(name or f"c{number}", f"question {number}", reference, duration_ms=duration_ms)


def make_job(root, **changes):
    values = {
        "subject": "adapter",
        "folder": str(root / "job"),
        "base_folder": str(root),
        "adapter_folder": None,
        "cases_file": str(root / "cases.jsonl"),
        "max_new_tokens": 8,
        "batch_size": 2,
        "latency_cases": 1,
        "identity": "weights-1",
        "answers_folder": str(root / "answers"),
    }
    return EvalJob(**{**values, **changes})


class Silent:
    def beat(self, *_arguments, **_detail): ...


def ask(job, cases, model=None):
    model = model or StandInEngine()
    runner = CaseRunner(job, engine=model, progress=Silent(), stop_asked=lambda: False)
    runner.ask_all(cases)
    return model, runner


def texts(job):
    from pathlib import Path

    return {(a.case_id, a.repeat): a.text for a in read_answers(Path(job.folder))}


def test_a_second_evaluation_asks_nothing(tmp_path):
    cases = [make_case(n) for n in range(5)]
    first = make_job(tmp_path)
    model, _ = ask(first, cases)
    assert sum(map(len, model.asked)) == 5
    second = make_job(tmp_path, folder=str(tmp_path / "later"))
    again, _ = ask(second, cases)
    assert again.asked == []
    assert texts(second) == texts(first)


def test_only_new_cases_are_asked_however_the_batches_fall(tmp_path):
    ask(make_job(tmp_path), [make_case(n) for n in range(5)])
    job = make_job(tmp_path, folder=str(tmp_path / "later"))
    model, _ = ask(job, [make_case(n) for n in (7, 0, 1, 2, 3, 4, 8)])
    assert model.asked == [[list(b"question 7"), list(b"question 8")]]
    assert len(texts(job)) == 7


def test_the_same_question_under_another_name_is_the_same_question(tmp_path):
    ask(make_job(tmp_path), [make_case(1)])
    job = make_job(tmp_path, folder=str(tmp_path / "later"))
    model, _ = ask(job, [make_case(1, name="renamed")])
    assert (model.asked, list(texts(job))) == ([], [("renamed", 0)])


@pytest.mark.parametrize(
    "change",
    [
        {"identity": "weights-2"},
        {"max_new_tokens": 9},
        {"worked_example": (Message(role="user", content="so"),)},
        {"temperature": 0.7},
        {"device": "cuda"},
        {"reasoning": False},
        {"perplexity": True},
        {"engine": "vllm 0.32.0"},
        {"precision": "bfloat16"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_an_answer_asks_again(tmp_path, change):
    job, case = make_job(tmp_path), make_case(1)
    assert answer_key(job, case) != answer_key(job.model_copy(update=change), case)


@pytest.mark.parametrize(
    "change", [{"batch_size": 9}, {"shards": 4}, {"seed": 5}, {"folder": "x"}, {"threads": 3}], ids=str
)
def test_settings_without_effect_on_greedy_answers_keep_them(tmp_path, change):
    job, case = make_job(tmp_path), make_case(1)
    assert answer_key(job, case) == answer_key(job.model_copy(update=change), case)


def test_an_endpoint_that_was_paid_for_is_not_asked_again_for_an_engine_of_ours(tmp_path):
    endpoint = Endpoint(url="http://127.0.0.1:1/v1", model="m")
    job, case = make_job(tmp_path, endpoint=endpoint), make_case(1)
    assert answer_key(job, case) == answer_key(job.model_copy(update={"engine": "vllm 0.32.0"}), case)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', b"[]"])
def test_a_torn_answer_is_asked_again_and_repaired(tmp_path, damage):
    case = make_case(1)
    job = make_job(tmp_path)
    ask(job, [case])
    (kept,) = (tmp_path / "answers").rglob("*.json")
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    model, _ = ask(make_job(tmp_path, folder=str(tmp_path / "later")), [case])
    assert len(model.asked) == 1
    assert b'"text": "10"' in whole
    assert b'"text": "10"' in kept.read_bytes()


def test_an_answer_that_was_changed_on_disk_is_not_believed(tmp_path):
    ask(make_job(tmp_path), [make_case(1)])
    (kept,) = (tmp_path / "answers").rglob("*.json")
    kept.write_bytes(kept.read_bytes().replace(b'"text": "10"', b'"text": "11"'))
    model, _ = ask(make_job(tmp_path, folder=str(tmp_path / "later")), [make_case(1)])
    assert len(model.asked) == 1


def test_a_subject_without_an_identity_keeps_nothing(tmp_path):
    ask(make_job(tmp_path, identity=""), [make_case(1)])
    assert not (tmp_path / "answers").exists()
    assert KeptAnswers(None).get("k", case_id="c") is None


def test_forgotten_answers_are_asked_again(tmp_path):
    cases, job = [make_case(n) for n in range(3)], make_job(tmp_path)
    ask(job, cases)
    forget_answers(job, cases)
    model, _ = ask(job, cases)
    assert sum(map(len, model.asked)) == 3


def test_repeats_are_drawn_apart_and_the_same_every_time(tmp_path):
    cases = [make_case(n) for n in range(3)]
    job = make_job(tmp_path, temperature=0.8, repeats=3, seed=7)
    model, _ = ask(job, cases)
    assert len(texts(job)) == 9
    assert len(set(model.seeds)) == len(model.seeds) == 6
    other = make_job(
        tmp_path, temperature=0.8, repeats=3, seed=7, folder=str(tmp_path / "b"), answers_folder=None
    )
    ask(other, cases)
    assert texts(other) == texts(job)
    assert seed_of(7, CaseBatch(0, ("a",))) != seed_of(8, CaseBatch(0, ("a",)))


def test_greedy_answers_are_asked_for_once(tmp_path):
    assert repeats_of(make_job(tmp_path, repeats=5)) == 1


def test_the_report_names_sampling_seed_and_repeats(tmp_path):
    job = make_job(tmp_path, temperature=0.5, top_p=0.9, seed=3, repeats=2, perplexity=True)
    _, runner = ask(job, [make_case(1)])
    made = runner.summarise(single_latency_seconds=(0.2,), first_token_seconds=(0.1,))
    expected = {"decoding": "sampled", "temperature": 0.5, "top_p": 0.9, "seed": 3, "repeats": 2}
    assert expected.items() <= made.settings.items()
    assert (made.answers, made.first_token_seconds) == (2, (0.1,))


def test_the_recorded_reply_is_weighed_where_asked(tmp_path):
    from pathlib import Path

    job = make_job(tmp_path, perplexity=True)
    ask(job, [make_case(1, reference="four")])
    assert [a.reference_loss for a in read_answers(Path(job.folder))] == [4.0]


def test_the_log_answers_with_its_own_replies_and_durations():
    cases = [make_case(n, reference=f"r{n}", duration_ms=500.0 * n) for n in range(4)]
    assert [a.text for a in answers_of_log(cases)] == ["r0", "r1", "r2", "r3"]
    made = generation_of_log(cases, latency_cases=3)
    assert made.single_latency_seconds == (0.0, 0.5, 1.0)
    missing = [*cases[:1], make_case(9)]
    assert generation_of_log(missing, latency_cases=2).single_latency_seconds == ()


def test_metadata_of_a_case_does_not_change_its_hash():
    plain, reported = make_case(1), make_case(1).model_copy(update={"domain": "law", "duration_ms": 3.0})
    assert hash_cases([plain]) == hash_cases([reported])
    assert hash_cases([plain]) != hash_cases([plain.model_copy(update={"checks": ({"kind": "exact"},)})])


def test_old_answers_still_load():
    old = {
        "case_id": "c",
        "text": "t",
        "tokens": 1,
        "prompt_tokens": 1,
        "finish_reason": "stop",
        "seconds": 1.0,
    }
    assert Answer.model_validate(old).repeat == 0
