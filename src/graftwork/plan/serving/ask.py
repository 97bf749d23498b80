"""The question, with what the user left out filled in.

In: a model of the catalog, a machine, and what the user stated. Out: a ServeQuestion. Does not look at files
or at this machine.
"""

from typing import Literal

from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel, require_dense
from graftwork.plan.serving.question import EngineName, Form, ServeQuestion
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Machine

NAMES_OF_FORMS: dict[str, Form | Literal["auto"]] = {
    "auto": "auto",
    **dict.fromkeys(("fp32", "f32", "float32", "32"), "32 bits"),
    **dict.fromkeys(("fp16", "bf16", "f16", "float16", "bfloat16", "16"), "16 bits"),
    **dict.fromkeys(("int8", "fp8", "q8", "q8_0", "8bit", "8"), "8 bits"),
    **dict.fromkeys(("int4", "nf4", "awq", "gptq", "q4", "q4_k_m", "4bit", "4"), "4 bits"),
}
NAMES_OF_ENGINES: dict[str, EngineName] = {
    "vllm": "vllm",
    "llama.cpp": "llama.cpp",
    "llamacpp": "llama.cpp",
    "embedded": "embedded",
}


def make_question(
    model: CatalogModel,
    *,
    machine: Machine,
    engine: str | None = None,
    weights: str = "auto",
    adapters: int = 0,
    rank: int = 16,
    copies: int = 1,
    users: int = 1,
    context: int = 2048,
    answer: int = 500,
    prompt: int | None = None,
    limit_seconds: float | None = None,
    memory_limit_gib: float | None = None,
) -> ServeQuestion:
    """`prompt` is all of the context but the answer unless it is stated: nothing is held from before."""
    require_dense(model)
    read = context - answer if prompt is None else prompt
    if read < 1 or read + answer > context:
        raise UserMistake(
            f"a context of {context} tokens does not hold {max(read, 1)} read and {answer} written",
            why="both stay in the model's memory until the last token",
            fix="raise --context, or lower --answer or --prompt",
            where="--context",
        )
    return ServeQuestion(
        model=model.name,
        doubt=model.doubt,
        shape=model.shape,
        machine=machine,
        engine=find_engine_name(engine, machine=machine),
        form=find_form(weights),
        adapters=adapters,
        rank=rank,
        targets=linear_names(model.shape),
        copies=copies,
        users=users,
        context=context,
        answer=answer,
        prompt=read,
        limit_seconds=limit_seconds,
        memory_limit_gib=memory_limit_gib,
    )


def find_form(name: str) -> Form | Literal["auto"]:
    plain = name.lower().removesuffix(" bits").removesuffix("-bit").strip()
    found = NAMES_OF_FORMS.get(plain)
    if found is None:
        raise UserMistake(
            f"weights cannot be served as {name!r}",
            fix="name one of auto, fp32, fp16, bf16, int8, fp8, 4bit",
            where="--weights",
        )
    return found


def find_engine_name(name: str | None, *, machine: Machine) -> EngineName:
    """vLLM on a card, llama.cpp on a processor, unless another is named."""
    if name is None:
        return "llama.cpp" if machine.gpu is None else "vllm"
    found = NAMES_OF_ENGINES.get(name.lower())
    if found is None:
        raise UserMistake(
            f"there is no engine {name!r}", fix="name one of vllm, llama.cpp, embedded", where="--engine"
        )
    if found == "vllm" and machine.gpu is None:
        raise UserMistake(
            "vLLM is planned for cards only",
            fix="name a card with --gpu, or --engine llama.cpp",
            where="--engine",
        )
    if found == "embedded" and machine.gpu is not None:
        raise UserMistake(
            "the embedded engine is planned for processors only", fix="leave --engine out", where="--engine"
        )
    return found
