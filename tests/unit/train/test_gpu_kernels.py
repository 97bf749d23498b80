"""Kernels on a GPU give the numbers of the plain functions next to which they are used.

Needs a GPU of Ampere or later: `make test-gpu`.
"""

import pytest
import torch

pytestmark = pytest.mark.gpu


def relative_error(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(("rows", "inputs"), [(96, 576), (33, 128), (1000, 3584)])
def test_nf4_weights_open_to_the_same_bits_as_operation_by_operation(rows, inputs):
    from graftwork.model.nf4 import LEVELS, Nf4Weight, dequantize, quantize
    from graftwork.train.gpu.linear import FourBitWeight, dequantize_four

    torch.manual_seed(rows)
    levels = torch.tensor(LEVELS, device="cuda")
    parts = tuple(quantize(torch.randn(rows, inputs, device="cuda") / 20) for _ in range(2))
    opened = dequantize_four(FourBitWeight(parts, levels, None), torch.bfloat16)
    on_host = [dequantize(Nf4Weight(*(held.cpu() for held in part)), torch.bfloat16) for part in parts]
    assert torch.equal(opened.cpu(), torch.cat(on_host))


def test_rows_of_a_table_in_host_memory_are_those_of_the_table():
    from graftwork.train.gpu.load import HostEmbedding

    table = torch.randn(500, 3000).bfloat16()
    tokens = torch.randint(0, 500, (77,))
    embedding = HostEmbedding(table, device="cuda")
    assert embedding.weight.is_pinned()
    assert torch.equal(embedding(tokens.cuda()).cpu(), table[tokens])


@pytest.mark.parametrize(("cap", "window"), [(20.0, None), (20.0, 100), (None, None), (None, 100)])
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 4, 256), (4, 4, 64), (6, 2, 96), (28, 4, 128)])
def test_packed_attention_and_its_gradients_are_those_of_plain_operations(heads, groups, width, cap, window):
    from graftwork.model.blocks import AttentionRule
    from graftwork.train.gpu.attention import Documents, attend_keeping

    torch.manual_seed(width)
    lengths = (300, 5, 129, 64)
    starts = torch.tensor([0, 300, 305, 434, 498, 498], dtype=torch.int32)
    together = torch.randn(498, heads + 2 * groups, width).bfloat16()
    split = torch.split(together, [heads, groups, groups], dim=1)
    d_mixed = torch.randn(498, heads, width).bfloat16()
    rule = AttentionRule(cap=cap, window=window)

    def run(device, dtype):
        documents = Documents(starts.to(device), lengths, at_most=512)
        island = attend_keeping(*(x.to(device, dtype) for x in split), documents, rule)
        return island.mixed, *island.backward(d_mixed.to(device, dtype))

    expected = run("cpu", torch.float32)
    first, again = run("cuda", torch.bfloat16), run("cuda", torch.bfloat16)
    for found, repeated, known in zip(first, again, expected, strict=True):
        assert relative_error(found.cpu(), known) < 1e-2
        assert torch.equal(found, repeated)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ending", [{}, {"cap": 30.0}, {"divisor": 8.0}, {"multiplier": 0.0625}])
def test_losses_and_the_gradient_in_place_of_logits_are_those_of_plain_operations(ending, weighted):
    from graftwork.model.parts import LogitsEnding
    from graftwork.train.gpu.fused import replace_by_gradient, target_losses

    torch.manual_seed(0)
    logits = (torch.randn(70, 49_155) * 4).bfloat16()
    targets = torch.randint(0, 49_155, (70,))
    targets[7] = -1
    weights = torch.rand(70) if weighted else None
    rule = LogitsEnding(**ending)

    def run(device):
        own = logits.to(device).clone()
        given = (targets.to(device), None if weights is None else weights.to(device), rule)
        losses = target_losses(own, given[0], rule)
        return losses, replace_by_gradient(own, *given), own

    for found, known in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(found.cpu(), known) < 3e-3
