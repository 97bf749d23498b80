"""The embedded engine serves on the device, and in the precision, in which evaluation asks."""

import pytest

from graftwork.engines.embedded import choose_device
from graftwork.engines.settings import EngineSettings
from graftwork.records.errors import EnvironmentFailure


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "chosen"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_a_gpu_is_used_where_there_is_one_unless_the_settings_say_otherwise(wanted, has_gpu, chosen):
    assert choose_device(wanted, has_gpu=lambda: has_gpu) == chosen


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error():
    with pytest.raises(EnvironmentFailure, match="no GPU"):
        choose_device("cuda", has_gpu=lambda: False)


def test_the_settings_name_the_device_of_the_embedded_engine():
    assert EngineSettings().device == "auto"
    assert EngineSettings(device="cpu").device == "cpu"
    with pytest.raises(ValueError, match="device"):
        EngineSettings(kind="vllm", device="cpu")


@pytest.mark.gpu
def test_on_a_machine_with_a_gpu_the_served_model_is_on_it_in_sixteen_bits(tiny_base):
    import torch

    from graftwork.engines.embedded_process import EmbeddedBackend
    from graftwork.engines.protocol import EngineJob

    backend = EmbeddedBackend(EngineJob(folder=str(tiny_base), base_folder=str(tiny_base)))
    weight = next(backend._engine._model.parameters())
    assert (weight.device.type, weight.dtype) == ("cuda", torch.bfloat16)
    assert backend.state()["device"] == torch.cuda.get_device_name()
