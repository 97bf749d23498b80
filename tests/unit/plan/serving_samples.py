"""Models, machines and questions that the tests of serving share."""

from typing import Any

from graftwork.plan.catalog.models import find_model
from graftwork.plan.serving_question import ServeQuestion
from graftwork.records.hardware import Cpu, Gpu, Machine
from graftwork.records.plan import ModelShape

SMOLLM2 = find_model("smollm2-135m").shape
DEEPSEEK = find_model("deepseek-coder-6.7b").shape
LLAMA_2_7B = DEEPSEEK.model_copy(update={"name": "llama-2-7b", "vocab_size": 32000})
QWEN = find_model("qwen2.5-coder-7b").shape
LLAMA_8B = find_model("llama-3.1-8b").shape
MISTRAL = LLAMA_8B.model_copy(update={"name": "mistral-7b", "vocab_size": 32768})
PHI_4 = find_model("phi-4").shape


def card(name: str, *, gib: float, gb_s: float, tflops: float, capability: float = 8.9, **more: Any) -> Gpu:
    eight = 2 * tflops if capability >= 8.9 else None
    return Gpu(
        name=name,
        memory_gib=gib,
        capability=capability,
        half_tflops=tflops,
        eight_tflops=eight,
        bandwidth_gb_s=gb_s,
        pcie_gb_s=32,
        watts=300,
        **more,
    )


RTX_5060_TI = card("RTX 5060 Ti 16GB", gib=15.57, gb_s=448, tflops=47.4, capability=12.0, launch_usd=429)
RTX_4090 = card("RTX 4090", gib=23.5, gb_s=1008, tflops=165.2, launch_usd=1599)
RTX_3080 = card("RTX 3080", gib=9.8, gb_s=760, tflops=59.5, capability=8.6)
L4 = card("L4", gib=22.0, gb_s=300, tflops=121)

EPYC_9454P = Cpu(name="EPYC 9454P", cores=48, gflops=4500, bandwidth_gb_s=461, watts=290)
EPYC_9554 = Cpu(name="EPYC 9554", cores=64, gflops=6000, bandwidth_gb_s=460.8, watts=360)
THREADRIPPER_5995WX = Cpu(name="5995WX", cores=64, gflops=6100, bandwidth_gb_s=204.8, watts=280)
TWO_CORES = Cpu(name="two AVX2 cores", cores=2, gflops=150, bandwidth_gb_s=20, watts=20)


def machine(on: Gpu | Cpu, *, gpus: int = 1, ram_gib: float = 128.0) -> Machine:
    if isinstance(on, Gpu):
        return Machine(gpu=on, gpus=gpus, ram_gib=ram_gib)
    return Machine(cpu=on, ram_gib=ram_gib)


def ask(
    shape: ModelShape, on: Gpu | Cpu, *, gpus: int = 1, ram_gib: float = 128.0, **more: Any
) -> ServeQuestion:
    engine = more.pop("engine", "vllm" if isinstance(on, Gpu) else "llama.cpp")
    context, answer = more.pop("context", 2048), more.pop("answer", 500)
    return ServeQuestion(
        model=shape.name,
        shape=shape,
        machine=machine(on, gpus=gpus, ram_gib=ram_gib),
        engine=engine,
        context=context,
        answer=answer,
        prompt=more.pop("prompt", context - answer),
        **more,
    )
