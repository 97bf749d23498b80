"""Tokens become text again, and every token is marked as trained or not."""

import pytest
from dataset_samples import CONTROL, ByteDecoder, row, write_dataset, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.inspect import TokenDecoder, cut_pieces, join_pieces, show_rows
from graftwork.records.errors import UserError


@pytest.fixture(scope="module")
def real_decoder(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(file)
    return TokenDecoder(file)


def test_trained_text_is_the_reply_and_the_end_of_its_turn():
    one = row("Wo ist der Käse?", "Im Kühlhaus.")
    pieces = join_pieces(cut_pieces(one.tokens, trained_from=one.trained_from, decoder=ByteDecoder()))
    assert "".join(piece.text for piece in pieces if piece.trained) == "Im Kühlhaus.<|end|>"
    assert (
        "".join(piece.text for piece in pieces if not piece.trained)
        == "<|user|>Wo ist der Käse?<|end|><|assistant|>"
    )
    assert {piece.text for piece in pieces if piece.control} == {
        "<|user|>",
        "<|end|>",
        "<|end|><|assistant|>",
    }


@settings(max_examples=60, deadline=None)
@given(question=st.text(max_size=30), reply=st.text(max_size=30))
def test_the_tokenizer_gives_back_the_text_and_loses_no_token(real_decoder, question, reply):
    one = row(question, reply)
    pieces = cut_pieces(one.tokens, trained_from=one.trained_from, decoder=real_decoder)
    assert tuple(token for piece in pieces for token in piece.tokens) == one.tokens
    assert sum(len(piece.tokens) for piece in pieces if piece.trained) == len(one.tokens) - one.trained_from
    assert "".join(piece.text for piece in pieces if piece.trained) == f"{reply}<|end|>"
    assert "".join(piece.text for piece in pieces) == f"<|user|>{question}<|end|><|assistant|>{reply}<|end|>"


def test_a_character_of_several_tokens_is_one_piece(real_decoder):
    pieces = real_decoder.decode_pieces([*"a😀b".encode()])
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert real_decoder.control_tokens == frozenset(CONTROL)


def test_bytes_that_are_no_character_are_shown_and_do_not_swallow_the_rest(real_decoder):
    pieces = real_decoder.decode_pieces([0xFF, 0xFF, 0xFF, 0xFF, 0xFF, *b"ok"])
    assert len(pieces) == 7
    assert "".join(pieces).endswith("ok")


def test_the_first_rows_of_a_split_or_one_by_the_beginning_of_its_id(tmp_path):
    rows = [row(f"question {n}", line=n, id=f"{n}abc") for n in range(1, 6)]
    folder = write_dataset(tmp_path, train=rows[:4], test=rows[4:])
    shown = show_rows(folder, decoder=ByteDecoder(), rows=3)
    assert [(row.split, row.number, row.id) for row in shown] == [
        ("train", 0, "1abc"),
        ("train", 1, "2abc"),
        ("train", 2, "3abc"),
    ]
    (one,) = show_rows(folder, decoder=ByteDecoder(), row_id="5a")
    assert (one.split, one.number, one.origin.line) == ("test", 0, 5)
    assert (one.tokens, one.trained_tokens) == (len(rows[4].tokens), len("a fine answer") + 1)


@pytest.mark.parametrize("row_id", ["zzz", "12"])
def test_a_missing_or_ambiguous_row_id_is_a_mistake(tmp_path, row_id):
    folder = write_dataset(tmp_path, train=[row("q", id="12a"), row("r", id="12b")])
    with pytest.raises(UserError) as caught:
        show_rows(folder, decoder=ByteDecoder(), row_id=row_id)
    assert caught.value.fix


def test_an_empty_split_is_a_mistake(tmp_path):
    folder = write_dataset(tmp_path, train=[row("q")])
    with pytest.raises(UserError, match="validation has no rows"):
        show_rows(folder, decoder=ByteDecoder(), split="validation")
