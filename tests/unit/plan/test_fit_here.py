"""What a plan knows of this machine, and that all that plan for it agree."""

import json

import pytest

from graftwork.costmodel.rates import rates_of
from graftwork.plan.catalog.hardware import GUESSED, USUAL_RAM_GIB, find_cpu, find_gpu, guess_cpu
from graftwork.plan.catalog.models import find_model, list_models, require_dense
from graftwork.plan.cost import Terms
from graftwork.plan.fit import project as fit
from graftwork.plan.fit.answer import fit as find_fit
from graftwork.plan.fit.candidates import flops_per_token
from graftwork.plan.fit.project import (
    FitRequest,
    answer_fit,
    ask,
    config_of,
    named_machine,
    question_of,
    read_gpus,
    this_machine,
)
from graftwork.plan.purchase import Use, read_purchase_option, weigh_purchase
from graftwork.plan.serving import make_question, serve
from graftwork.plan.serving_question import ServeLoad
from graftwork.records.errors import UserError
from graftwork.records.plan import DeviceFacts

TWO_T4 = "0, GPU-a, Tesla T4, 15360\n1, GPU-b, Tesla T4, 15360\n"
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_local_experts": 4,
}


def test_cards_are_read_as_the_driver_reports_them():
    output = (
        "0, GPU-a, NVIDIA GeForce RTX 5060 Ti, 16311\n1, GPU-b, NVIDIA, Odd, 100\n"
        "no card\n\n2, GPU-c, H200, x\n"
    )
    assert read_gpus(output) == [("NVIDIA GeForce RTX 5060 Ti", 16311 / 1024), ("NVIDIA, Odd", 100 / 1024)]


def test_cards_that_are_hidden_from_this_process_are_not_planned_with():
    assert len(read_gpus(TWO_T4, visible="1")) == 1
    assert len(read_gpus(TWO_T4, visible="GPU-b,GPU-a")) == 2
    assert read_gpus(TWO_T4, visible="") == []


def test_a_processor_that_no_catalog_knows_is_guessed_alike_for_training_and_serving(monkeypatch):
    unknown = DeviceFacts(kind="cpu", name="A processor of next year", memory_gib=16, threads=4)
    monkeypatch.setattr(fit, "ask_driver", lambda: "")
    monkeypatch.setattr(fit, "describe_device", lambda: unknown)
    here = named_machine()
    assert here.cpu == guess_cpu(unknown.name, threads=4)
    assert here.cpu is not None
    assert here.cpu.source == GUESSED
    assert named_machine(ram_gib=2.0).ram_gib == 2.0


def test_no_driver_is_asked_where_the_card_is_named(monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: pytest.fail("asked"))
    assert named_machine(gpu="T4").gpus == 1
    assert named_machine(cpu="EPYC 9454P").gpu is None


def test_cards_of_no_kind_are_a_mistake(monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: "")
    with pytest.raises(UserError, match="of which kind"):
        named_machine(gpus=2)


def test_training_of_experts_is_planned_and_their_serving_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL, "num_experts_per_tok": 2}))
    model = find_model(tmp_path)
    question = ask(FitRequest(gpu="RTX 4090", ram=64.0, method="lora"), model=model, project=None)
    answer = find_fit(question)
    assert any("2 of 4 experts" in reason and "only attention" in reason for reason in answer.reasons)
    assert any("mixtral" in reason and "plain step" in reason for reason in answer.reasons)
    more = find_fit(question.model_copy(update={"experts": True}))
    assert more.trainable_parameters.value > answer.trainable_parameters.value
    assert more.peak_allocated_gib.value > answer.peak_allocated_gib.value
    # Idle experts are weights, and no work.
    dense = model.shape.model_copy(update={"experts_used": 4})
    assert flops_per_token(question) < flops_per_token(question.model_copy(update={"shape": dense}))
    with pytest.raises(UserError, match="experts"):
        make_question(model, ServeLoad(), machine=named_machine(gpu="T4"))


def test_every_model_of_the_catalog_is_dense():
    for model in list_models():
        require_dense(model)


def test_a_family_that_nobody_wrote_out_is_reported_as_taken_for_llama(tmp_path):
    config = {**MIXTRAL, "model_type": "falcon_of_next_year", "num_local_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = answer_fit(FitRequest(model=str(tmp_path), gpu="T4", ram=64.0, seq="64", trace=False))
    assert any("falcon_of_next_year" in reason for reason in answer.reasons)
    served = serve(make_question(find_model(tmp_path), ServeLoad(), machine=named_machine(gpu="T4")))
    assert any("falcon_of_next_year" in note for note in served.notes)
    plain = answer_fit(FitRequest(model="olmo-7b", gpu="T4", ram=64.0, seq="64", trace=False))
    assert plain.certainty == "guessed"
    assert any("estimated as a Llama's" in reason for reason in plain.reasons)
    known = answer_fit(FitRequest(model="qwen3-8b", gpu="T4", ram=64.0, seq="64"))
    assert not any("Llama" in reason for reason in known.reasons)


def test_this_machine_takes_its_memory_from_the_driver_and_the_rest_from_the_catalog(monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: TWO_T4)
    here = this_machine()
    assert here.gpus == 2
    assert here.gpu is not None
    assert here.gpu.memory_gib == 15.0
    assert here.gpu.half_tflops == 65
    assert here.gpu.capability == 7.5


def test_without_a_driver_there_is_a_processor(monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: "")
    here = this_machine()
    assert here.gpu is None
    assert here.cpu is not None
    assert here.ram_gib > 0


def test_stated_hardware_takes_precedence_over_this_machine(monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: TWO_T4)
    model = find_model("llama-3.2-1b")
    asked = FitRequest(model=model.name, gpu="RTX 4090", gpus=2, ram=64.0, seq="700", rank=4, nvlink=False)
    question = ask(asked, model=model, project=None)
    assert question.machine.name == "2 × RTX 4090"
    assert question.lengths == (700,)
    assert question.rank == 4
    assert ask(FitRequest(cpu="9950X"), model=model, project=None).machine.gpu is None


def test_a_model_of_the_catalog_has_a_configuration_to_trace():
    config = config_of(find_model("qwen2.5-coder-7b"))
    assert config["model_type"] == "qwen2"
    assert config["num_hidden_layers"] == 28


def test_a_family_without_a_recipe_is_traced_once_where_the_libraries_are_installed(monkeypatch, tmp_path):
    messages, traced = [], []

    def trace(config, setup):
        traced.append(config["model_type"])
        return 5e9

    monkeypatch.setattr(fit, "can_trace", lambda: True)
    monkeypatch.setattr(fit, "trace", trace)
    monkeypatch.setattr(fit, "models_folder", lambda: tmp_path / "models")
    asked = FitRequest(model="gemma-2-2b", method="lora", gpu="RTX 4090", ram=64.0, seq="512", engine="hf")
    answers = [answer_fit(asked, on_progress=messages.append) for _ in range(2)]
    assert traced == ["gemma2"]
    assert len(messages) == 1
    assert all(answer.certainty == "traced" for answer in answers)


def test_a_family_whose_blocks_are_written_out_needs_no_trace():
    answer = answer_fit(FitRequest(model="gemma-2-2b", method="lora", gpu="RTX 4090", ram=64.0, seq="512"))
    assert answer.certainty == "computed"
    assert answer.strategy.tuning is not None


def test_the_range_of_a_guess_contains_the_known_misses(monkeypatch):
    """Counted as a Llama, Gemma 2 and StarCoder 2 were 11 to 18 % too low."""
    asked = FitRequest(
        model="gemma-2-2b", method="lora", gpu="RTX 4090", ram=64.0, seq="512", trace=False, engine="hf"
    )
    for figure in (answer_fit(asked).peak_allocated_gib, answer_fit(asked).peak_reserved_gib):
        assert figure.low <= figure.value / 1.18
        assert figure.high >= figure.value / 0.82


CARD = "RTX 5060 Ti 16GB"
RUN = {"model": "deepseek-coder-6.7b", "method": "qlora", "seq": "2048", "rows": 5000, "epochs": 3}


@pytest.fixture(params=[8.0, 512.0])
def this_memory(request, monkeypatch):
    """Whatever memory the machine has that plans."""
    here = fit.describe_device().model_copy(update={"memory_gib": request.param})
    monkeypatch.setattr(fit, "describe_device", lambda: here)


@pytest.mark.usefixtures("this_memory")
def test_fit_and_buy_agree_on_two_cards_whatever_this_machine_has():
    from datetime import date

    fitted = answer_fit(FitRequest(gpu=CARD, gpus=2, **RUN))
    bought = weigh_purchase(
        question_of(FitRequest(gpu=CARD, gpus=1, **RUN)),
        have=read_purchase_option(CARD, option="--have"),
        options=[read_purchase_option(f"2x {CARD}=700", option="--option")],
        use=Use(7, 2, 0.3, 0.5, 120, 0),
        terms=Terms(
            today=date(2026, 11, 1), runs_per_month=30, waiting_usd_per_hour=0.0, electricity_usd_kwh=0.3
        ),
    )
    hours = next(
        choice for choice in bought.choices if choice.machine and choice.machine.gpus == 2
    ).hours_per_run
    assert hours.value == pytest.approx(fitted.run_minutes.value / 60, rel=0.02)


def test_host_memory_that_is_assumed_is_named():
    named = named_machine(gpu=CARD)
    assert named.ram_gib == USUAL_RAM_GIB
    assert "64 GiB" in named.assumed[0]
    assert named_machine(gpu=CARD, ram_gib=128).assumed == ()
    assert named_machine().assumed == ()
    answer = answer_fit(FitRequest(gpu=CARD, **RUN))
    assert any("64 GiB" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("name", "cores", "gflops"), [("16 cores", 16, 1120), ("8 vCPU", 8, 280), ("4-core", 4, 280)]
)
def test_a_processor_can_be_named_by_its_number_of_cores(name, cores, gflops):
    cpu = find_cpu(name)
    assert (cpu.cores, cpu.gflops, cpu.source) == (cores, gflops, GUESSED)


def test_no_cores_are_no_processor():
    with pytest.raises(UserError):
        find_cpu("0 cores")


def ask_serving(**changes):
    machine = changes.pop("machine", None) or named_machine(cpu="16 cores", ram_gib=128)
    load = ServeLoad(**{"users": 4, **changes})
    return serve(make_question(find_model("deepseek-coder-6.7b"), load, machine=machine))


def test_without_a_limit_serving_prefers_the_widest_weights_that_somebody_waits_for():
    slow = ask_serving()
    fastest = min(
        (row for row in slow.quantisations if row.fits), key=lambda row: row.latency.answer_seconds.value
    )
    assert slow.weights == fastest.form != "32 bits"
    small = serve(
        make_question(
            find_model("smollm2-135m"), ServeLoad(), machine=named_machine(cpu="16 cores", ram_gib=128)
        )
    )
    assert small.weights == "32 bits"


def test_a_t4_is_as_fast_as_its_power_cap_lets_it_be():
    """Measured by others: 24 of the stated 65 TFLOPS over a long run of products."""
    assert rates_of(find_gpu("T4")).half < 24e12
    answer = answer_fit(FitRequest(gpu="T4", ram=64, **RUN))
    assert answer.tokens_per_second.value < 400
