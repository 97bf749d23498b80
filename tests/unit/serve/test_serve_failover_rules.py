"""The decisions that keep an endpoint up: breaker, retry budget, balance and chains. No process or socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graftwork.engines.settings import EngineSettings
from graftwork.http.messages import ApiError
from graftwork.serve.engine_interface import NoReplica, failure_code
from graftwork.serve.replicas import (
    RETRY_SHARE,
    CircuitBreaker,
    Replica,
    RetryBudget,
    is_replica_fault,
)
from graftwork.serve.routing import find_chain
from graftwork.serve.settings import FailoverSettings


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_breaker(failures=3, pause=1.0):
    clock = Clock()
    return CircuitBreaker(failures, pause, clock=clock), clock


def open_it(breaker):
    for _ in range(breaker.most):
        breaker.fail(breaker.begin())


# -- circuit breaker -----------------------------------------------------------------------------


def test_a_circuit_opens_after_failures_in_a_row_and_not_after_failures_between_successes():
    breaker, _ = make_breaker(failures=3)
    for _ in range(20):
        breaker.fail(breaker.begin())
        breaker.fail(breaker.begin())
        breaker.succeed(breaker.begin())
    assert breaker.state == "closed"
    open_it(breaker)
    assert breaker.state == "open"
    assert not breaker.allows()


def test_a_half_open_circuit_lets_one_request_try_and_closes_if_it_succeeds():
    breaker, clock = make_breaker()
    open_it(breaker)
    clock.now = 1.0
    assert breaker.state == "half_open"
    assert breaker.allows()
    trial = breaker.begin()
    assert not breaker.allows()
    breaker.succeed(trial)
    assert breaker.state == "closed"


def test_each_failed_trial_doubles_the_pause_up_to_the_longest():
    breaker, clock = make_breaker(pause=10.0)
    open_it(breaker)
    pauses = []
    for _ in range(4):
        began = clock.now
        while not breaker.allows():
            clock.now += 0.5
        pauses.append(clock.now - began)
        breaker.fail(breaker.begin())
    assert pauses == [10.0, 20.0, 30.0, 30.0]


def test_a_trial_whose_client_leaves_makes_room_for_another():
    breaker, clock = make_breaker()
    open_it(breaker)
    clock.now = 1.0
    breaker.abandon(breaker.begin())
    assert breaker.allows()


def test_requests_that_began_before_the_circuit_opened_do_not_close_it():
    breaker, _ = make_breaker()
    early = breaker.begin()
    open_it(breaker)
    breaker.succeed(early)
    assert breaker.state == "open"


def test_failures_of_an_old_process_do_not_count_against_the_new_one():
    breaker, _ = make_breaker(failures=2)
    old = [breaker.begin() for _ in range(10)]
    breaker.reset()
    for permit in old:
        breaker.fail(permit)
    assert breaker.state == "closed"


STEPS = ["begin", "succeed", "fail", "abandon", "wait", "reset"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9))))
def test_at_most_one_trial_runs_whatever_happens(steps):
    """A circuit that is not closed never lets a second request pass while the first one tries."""
    breaker, clock = make_breaker(failures=2)
    permits, trials = [], set()
    for step, number in steps:
        if step == "begin":
            if not breaker.allows():
                continue
            is_trial = breaker.state != "closed"
            permits.append(breaker.begin())
            if is_trial:
                assert not trials
                trials.add(permits[-1])
        elif step == "wait":
            clock.now += number / 3
        elif step == "reset":
            breaker.reset()
            trials.clear()
        elif permits:
            permit = permits.pop(number % len(permits))
            getattr(breaker, step)(permit)
            trials.discard(permit)
        assert breaker.state in ("closed", "open", "half_open")


# -- retry budget --------------------------------------------------------------------------------


@given(st.integers(0, 20), st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_the_burst_and_their_share_of_the_requests(burst, steps):
    budget, requests = RetryBudget(burst=burst), 0
    for is_request in steps:
        if is_request:
            budget.deposit()
            requests += 1
        else:
            budget.withdraw()
        assert budget.spent <= burst + RETRY_SHARE * requests + 1e-6


def test_a_budget_that_is_spent_fills_again_with_requests():
    budget = RetryBudget(burst=2)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.deposit()
    assert not budget.withdraw()
    for _ in range(2):
        budget.deposit()
    assert budget.withdraw()
    assert (budget.spent, budget.refused) == (3, 2)


# -- balance -------------------------------------------------------------------------------------


def make_replicas(weights):
    return [Replica("", None, weight=weight, settings=FailoverSettings()) for weight in weights]


def choose(replicas):
    return min(replicas, key=Replica.load)


weights = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=6)


@given(weights, st.integers(1, 200))
def test_one_request_at_a_time_is_spread_by_weight(values, count):
    replicas = make_replicas(values)
    for _ in range(count):
        choose(replicas).assigned += 1
    for replica in replicas:
        assert abs(replica.assigned - count * replica.weight / sum(values)) <= len(replicas)


@given(weights, st.integers(1, 200))
def test_running_requests_are_spread_by_weight(values, count):
    replicas = make_replicas(values)
    for _ in range(count):
        chosen = choose(replicas)
        chosen.outstanding += 1
        chosen.assigned += 1
    for replica in replicas:
        for other in replicas:
            most = other.outstanding / other.weight + 1 / replica.weight
            assert replica.outstanding / replica.weight <= most + 1e-9


# -- chains --------------------------------------------------------------------------------------


def test_only_failures_that_another_model_could_avoid_are_passed_to_another_model():
    assert failure_code(ConnectionResetError()) == "engine_down"
    assert failure_code(NoReplica("none")) == "engine_down"
    assert failure_code(TimeoutError()) == "attempt_timeout"
    assert failure_code(ApiError(503, "loading", code="model_not_loaded")) == "model_not_loaded"
    assert failure_code(ApiError(500, "broken")) == "engine_error"
    assert failure_code(ApiError(429, "full", code="full")) == "full"
    assert failure_code(ApiError(400, "bad request")) is None
    assert failure_code(ApiError(504, "late", code="timeout")) is None
    assert failure_code(ValueError()) is None


def test_a_full_replica_and_a_bad_request_are_no_fault_of_the_replica():
    assert is_replica_fault(ConnectionResetError())
    assert is_replica_fault(ApiError(502, "broken"))
    assert not is_replica_fault(ApiError(429, "full", code="full"))
    assert not is_replica_fault(ApiError(400, "bad request"))
    assert not is_replica_fault(ApiError(504, "late", code="timeout"))


def test_a_model_has_its_own_chain_or_the_one_for_all():
    chains = {"support": ("champion", "base"), "*": ("base", "remote")}
    assert find_chain(chains, "support") == ("champion", "base")
    assert find_chain(chains, "champion") == ("base", "remote")
    assert find_chain(chains, "base") == ("remote",)
    assert find_chain({}, "champion") == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"fallback": {"base": ["base"]}},
        {"fallback": {"champion": ["base", "base"]}},
        {"endpoints": {"../x": {"url": "http://127.0.0.1:1/v1", "model": "m"}}},
        {"frozen_seconds": 0},
    ],
)
def test_settings_that_contradict_themselves_are_refused(wrong):
    with pytest.raises(ValidationError):
        FailoverSettings.model_validate(wrong)


def test_replicas_are_a_number_of_processes_or_a_list_of_servers():
    assert [weight for _, weight in EngineSettings(replicas=3).split_replicas()] == [1.0, 1.0, 1.0]
    servers = [{"url": "http://10.0.0.1:8000/v1", "weight": 2}, {"url": "http://10.0.0.2:8000/v1"}]
    settings = EngineSettings.model_validate({"kind": "vllm", "replicas": servers})
    assert [(one.url, weight) for one, weight in settings.split_replicas()] == [
        ("http://10.0.0.1:8000/v1", 2.0),
        ("http://10.0.0.2:8000/v1", 1.0),
    ]
    for wrong in (
        {"kind": "embedded", "replicas": servers},
        {"kind": "vllm", "replicas": servers, "url": "http://10.0.0.3:8000/v1"},
        {"kind": "vllm", "replicas": 2, "url": "http://10.0.0.3:8000/v1"},
        {"kind": "vllm", "replicas": []},
        {"kind": "embedded", "replicas": 0},
    ):
        with pytest.raises(ValidationError):
            EngineSettings.model_validate(wrong)
