"""A card gets as many rows as it has room for."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.model.generate.scheduler import MOST_ROWS, rows_that_fit
from graftwork.records.base import GIB

SEVEN = SimpleNamespace(
    num_attention_heads=28,
    num_key_value_heads=4,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    vocab_size=152_064,
)


def rows(free: float, *, prompt: int = 512, new: int = 256) -> int:
    return rows_that_fit(SEVEN, prompt_tokens=prompt, new_tokens=new, free_bytes=int(free * GIB))


def test_a_large_card_gets_the_most() -> None:
    assert rows(120) == MOST_ROWS


def test_next_to_a_7b_model_a_16_gb_card_has_room_for_a_few() -> None:
    assert 1 <= rows(1) < 16


def test_a_full_card_still_tries_one() -> None:
    assert rows(0) == 1


@given(st.floats(0, 200), st.floats(0, 200), st.integers(1, 4000), st.integers(1, 4000))
def test_more_room_or_shorter_rows_never_mean_fewer(a: float, b: float, p: int, q: int) -> None:
    assert rows(min(a, b)) <= rows(max(a, b))
    assert rows(a, prompt=max(p, q)) <= rows(a, prompt=min(p, q))


@given(st.floats(0.1, 200), st.integers(1, 4000), st.integers(1, 2000))
def test_a_batch_never_needs_more_than_the_free_memory(free: float, prompt: int, new: int) -> None:
    found = rows(free, prompt=prompt, new=new)
    keys = 2 * 28 * 4 * 128 * 2 * (prompt + new)
    reading = 2 * (4 * 3584 + 3 * 18944) * prompt
    assert found == 1 or found * (2 * keys + reading) < free * GIB


def configurations() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("kind", configurations())
def test_every_decoder_of_transformers_gets_some_rows(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    except Exception as error:
        pytest.skip(f"no configuration without arguments: {type(error).__name__}")
    found = rows_that_fit(config, prompt_tokens=512, new_tokens=64, free_bytes=24 * GIB)
    assert 1 <= found <= MOST_ROWS
