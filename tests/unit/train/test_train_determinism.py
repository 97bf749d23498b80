"""Which runs add up in the same order every time, and how torch is set for that."""

import os
from types import SimpleNamespace

import pytest
import torch

from graftwork.model.generate.sampling import any_order
from graftwork.records.errors import UserError
from graftwork.train.settings import TrainSettings
from graftwork.train.worker import AUTO, explain_missing_kernels, is_deterministic, use_deterministic_kernels


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def plan(kind="cuda", *, streamed=None, tuning=None):
    return SimpleNamespace(device=SimpleNamespace(kind=kind), streamed=streamed, tuning=tuning)


def test_a_run_on_a_cpu_is_always_deterministic():
    assert is_deterministic(plan("cpu"), TrainSettings(deterministic="off"))


@pytest.mark.parametrize(
    ("made", "kind"),
    [(plan(streamed=object()), "streamed"), (plan(tuning=object()), "packed"), (plan(), "plain")],
)
def test_a_card_follows_the_setting_and_else_the_table(made, kind):
    assert is_deterministic(made, TrainSettings(deterministic="on"))
    assert not is_deterministic(made, TrainSettings(deterministic="off"))
    assert is_deterministic(made, TrainSettings()) == AUTO[kind]


def test_streamed_layers_are_deterministic_by_default():
    assert is_deterministic(plan(streamed=object()), TrainSettings())


def test_kernels_are_asked_for_strictly():
    """With warnings only, attention would stay one that adds up in another order each time."""
    use_deterministic_kernels(True, on_gpu=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_fast_kernels_leave_cublas_alone():
    use_deterministic_kernels(False, on_gpu=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_sampling_may_use_kernels_without_a_deterministic_version():
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    for before in (True, False):
        torch.use_deterministic_algorithms(before)
        with any_order(on_gpu):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() == before
        with any_order(on_cpu):
            assert torch.are_deterministic_algorithms_enabled() == before


def test_a_missing_kernel_names_the_setting():
    torch_says = "cumsum_cuda_kernel does not have a deterministic implementation, but you set …"
    with pytest.raises(UserError, match="cumsum_cuda_kernel") as found, explain_missing_kernels():
        raise RuntimeError(torch_says)
    assert "train.deterministic: off" in found.value.fix
    with pytest.raises(RuntimeError, match="out of memory"), explain_missing_kernels():
        raise RuntimeError("out of memory")


def test_the_setting_does_not_make_another_run():
    fast, same = TrainSettings(deterministic="off"), TrainSettings(deterministic="on")
    assert fast.what_is_learned() == same.what_is_learned()
    assert fast.keeping()["deterministic"] == "off"
