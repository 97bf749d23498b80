"""What a plan knows of this machine and of a project's rows."""

from graftwork.coordinate import fit_here
from graftwork.coordinate.fit import Asked, ask
from graftwork.coordinate.fit_here import Card, read_cards, this_machine
from graftwork.coordinate.fit_trace import config_of
from graftwork.plan.catalog.models import find_model


def test_cards_are_read_as_the_driver_tells_them():
    said = "NVIDIA GeForce RTX 5060 Ti, 16311, 12.0\nNVIDIA, Odd, 100, 8.0\nno card\n\nH200, x, 9.0\n"
    assert read_cards(said) == [
        Card("NVIDIA GeForce RTX 5060 Ti", 16311 / 1024, 12.0),
        Card("NVIDIA, Odd", 100 / 1024, 8.0),
    ]


def test_this_machine_takes_its_memory_from_the_driver_and_the_rest_from_the_catalog(monkeypatch):
    monkeypatch.setattr(fit_here, "ask_driver", lambda: "Tesla T4, 15360, 7.5\nTesla T4, 15360, 7.5\n")
    here = this_machine()
    assert here.gpus == 2
    assert here.gpu is not None
    assert here.gpu.memory_gib == 15.0
    assert here.gpu.half_tflops == 65


def test_without_a_driver_there_is_a_processor(monkeypatch):
    monkeypatch.setattr(fit_here, "ask_driver", lambda: "")
    here = this_machine()
    assert here.gpu is None
    assert here.cpu is not None
    assert here.ram_gib > 0


def test_what_is_stated_goes_before_what_is_here(monkeypatch):
    monkeypatch.setattr(fit_here, "ask_driver", lambda: "Tesla T4, 15360, 7.5\n")
    model = find_model("llama-3.2-1b")
    asked = Asked(model=model.name, gpu="RTX 4090", gpus=2, ram=64.0, seq="700", rank=4, nvlink=False)
    question = ask(asked, model=model, project=None)
    assert question.machine.name == "2 × RTX 4090"
    assert question.lengths == (700,)
    assert question.rank == 4
    assert ask(Asked(cpu="9950X"), model=model, project=None).machine.gpu is None


def test_a_model_of_the_catalog_has_a_configuration_to_trace():
    config = config_of(find_model("qwen2.5-coder-7b"))
    assert config["model_type"] == "qwen2"
    assert config["num_hidden_layers"] == 28
