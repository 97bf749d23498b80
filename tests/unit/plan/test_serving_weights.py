"""The weights take what published files take, to half a percent."""

import pytest
from serving_samples import DEEPSEEK, LLAMA_8B, PHI_4, QWEN, SMOLLM2

from graftwork.model.shape import total_parameters
from graftwork.plan.serving_question import Form, weigh

PUBLISHED_GB = [
    (DEEPSEEK, "4 bits", 4.08),
    (QWEN, "8 bits", 8.10),
    (LLAMA_8B, "8 bits", 8.54),
    (LLAMA_8B, "4 bits", 4.92),
    (SMOLLM2, "4 bits", 0.10545),
]
"""Q8_0 and Q4_K_M in GB of 10^9 bytes, read 2026-11-15: TheBloke/deepseek-coder-6.7B-instruct-GGUF,
bartowski/Meta-Llama-3.1-8B-Instruct-GGUF and SmolLM2-135M-Instruct-GGUF; 7.54 GiB in llama.cpp#16894."""
VOCABULARY_GB = 0.002
"""Files hold the words too."""


@pytest.mark.parametrize(("shape", "form", "gigabytes"), PUBLISHED_GB)
def test_a_gguf_model_takes_what_its_file_takes(shape, form, gigabytes):
    assert weigh(shape, form=form, engine="llama.cpp")[0] / 1e9 == pytest.approx(
        gigabytes, rel=0.005, abs=VOCABULARY_GB
    )


def test_a_layer_that_holds_queries_keys_and_values_is_stored_more_carefully():
    fused = {
        "qkv_proj": (5120, 7680),
        "o_proj": (5120, 5120),
        "gate_up_proj": (5120, 35840),
        "down_proj": (17920, 5120),
    }
    shape = PHI_4.model_copy(update={"linears": fused})
    # llama-bench of Phi-4 names these sizes: 14.51 and 8.43 GiB.
    assert weigh(shape, form="8 bits", engine="llama.cpp")[0] / 2**30 == pytest.approx(14.51, rel=0.005)
    assert weigh(shape, form="4 bits", engine="llama.cpp")[0] / 2**30 == pytest.approx(8.43, rel=0.005)


def test_sixteen_bits_are_two_bytes_a_parameter():
    assert weigh(DEEPSEEK, form="16 bits", engine="vllm")[0] == 2 * total_parameters(DEEPSEEK)


def test_four_bits_on_a_card_leave_embeddings_and_head_in_sixteen():
    outside = 2 * 2 * DEEPSEEK.vocab_size * DEEPSEEK.hidden_size
    held = weigh(DEEPSEEK, form="4 bits", engine="vllm")[0]
    assert held / 1e9 == pytest.approx(3.9, rel=0.01)
    assert held > outside + 0.5 * (total_parameters(DEEPSEEK) - outside / 2)


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("shape", [SMOLLM2, DEEPSEEK, QWEN, LLAMA_8B])
def test_fewer_bits_are_fewer_bytes(shape, engine):
    forms: tuple[Form, ...] = ("32 bits", "16 bits", "8 bits", "4 bits")
    held = [weigh(shape, form=form, engine=engine)[0] for form in forms]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def test_a_token_reads_all_but_the_table_of_embeddings():
    untied = weigh(QWEN, form="16 bits", engine="vllm")
    assert untied[0] - untied[1] == 2 * QWEN.vocab_size * QWEN.hidden_size
    tied = weigh(SMOLLM2, form="16 bits", engine="vllm")
    assert tied[0] == tied[1]
