"""The tokenizer of a base as metadata of a GGUF file.

In: the tokenizer.json, tokenizer_config.json and template of a folder. Out: keys and values, and whether
llama.cpp will split text exactly as the tokenizer does. Our own engine sends tokens, so only other programs
depend on that.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.model.chat.template import ChatTemplate
from graftwork.model.shape import read_json_object
from graftwork.records.errors import UserMistake

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of a token, as llama.cpp numbers them."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
}
"""The patterns that llama.cpp knows by name."""


class GgufVocabulary(NamedTuple):
    metadata: dict[str, Any]
    exact: bool
    """Whether llama.cpp splits text as the tokenizer does."""


def read_vocabulary(folder: Path, *, size: int) -> GgufVocabulary:
    """`size` is the number of rows of the embedding; rows without a token get a name of their own."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UserMistake(
            "a tokenizer of this kind cannot be written as GGUF",
            why=f"the writer knows byte-level BPE; this one is {model.get('type')}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''}",
            fix="serve the model with the embedded engine or vLLM",
            where=str(folder / "tokenizer.json"),
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in tokenizer.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    split = _known_split(tokenizer.get("pre_tokenizer")) if tokenizer.get("normalizer") is None else None
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split or "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        **_special_tokens(folder, {text: number for number, text in enumerate(tokens)}),
    }
    return GgufVocabulary(metadata, exact=split is not None)


def _special_tokens(folder: Path, numbers: dict[str, int]) -> dict[str, Any]:
    template = ChatTemplate.from_folder(folder)
    # The end of turn, not the configured end of text: programs that read the file stop there.
    found: dict[str, Any] = {
        "tokenizer.ggml.eos_token_id": template.eos,
        "tokenizer.chat_template": template.source,
    }
    config = read_json_object(folder / "tokenizer_config.json", states="the special tokens and the template")
    for key, name in (("bos_token", "bos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text in numbers:
            found[f"tokenizer.ggml.{name}_token_id"] = numbers[text]
    return found


def _known_split(pre: Any) -> str | None:
    """llama.cpp's name for how text is split before BPE; None for a split that it has no name for."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre or {"type": ""}]
    kinds = [step["type"] for step in steps]
    if any(step["type"] == "ByteLevel" and step.get("add_prefix_space") for step in steps):
        return None
    own_pattern = steps[-1]["type"] == "ByteLevel" and steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and own_pattern:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and own_pattern and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not own_pattern and steps[0]["behavior"] == "Isolated":
        return SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    return None
