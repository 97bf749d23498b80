"""The most that a card could do if nothing were ever waited for: a claim above it is wrong. Pure.

In: a question and a claimed rate. Out: the roof, and a mistake that says by how much the claim passes it.
"""

from graftwork.model.shape import layer_parameters
from graftwork.records.errors import UserMistake
from graftwork.records.fit import FitQuestion


def flops_a_token(question: FitQuestion) -> float:
    """The least that a token takes: forward, and backward through the adapted layers."""
    shape = question.shape
    weights = shape.layers * layer_parameters(shape)
    table = shape.vocab_size * shape.hidden_size
    backward = 2 if question.method == "full" else 1
    learned = weights * question.adapted_layers / shape.layers
    return 2.0 * (weights + backward * learned) + 2.0 * table * (1 + backward) * question.trained_share


def most_tokens_per_second(question: FitQuestion, *, eight: bool = False) -> float | None:
    """All cards at their stated peak; None without a card."""
    gpu, machine = question.machine.gpu, question.machine
    if gpu is None:
        return None
    peak = gpu.half_tflops
    if eight and gpu.has_fp8 and gpu.eight_tflops is not None:
        peak = gpu.eight_tflops
    return machine.gpus * peak * 1e12 / flops_a_token(question)


def require_possible(question: FitQuestion, claimed: float, *, eight: bool = False) -> float:
    """The share of the peak that a claimed rate needs; a mistake where that is more than all."""
    gpu = question.machine.gpu
    most = most_tokens_per_second(question, eight=eight)
    if gpu is None or most is None:
        return 0.0
    share = claimed / most
    if share <= 1:
        return share
    needed = claimed * flops_a_token(question) / 1e12
    has = needed / share
    raise UserMistake(
        f"{claimed:,.0f} tokens/s cannot be: it needs {needed:,.0f} of {has:,.0f} TFLOPS",
        why=f"a token of {question.model} takes {flops_a_token(question) / 1e9:.1f} GFLOP at the very least",
        fix=f"the roof of {question.machine.name} is {most:,.0f} tokens/s: ask how that was measured",
        where="--claim",
    )
