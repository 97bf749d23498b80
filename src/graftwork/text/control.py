"""Control tokens of language models inside plain text.

In: a text and the tokens to look for. Out: those that stand in it. A template turns such text into
turns that nobody spoke. Knows the tokens of the usual families; which of them a tokenizer really
takes for control is the tokenizer's to say.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

KNOWN_CONTROL_TOKENS: tuple[str, ...] = (
    # ChatML: Qwen, SmolLM, Yi and many fine-tunes
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>"),
    # Llama 2, Mistral
    *("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    # Llama 3 and 4
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    # Gemma
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    # Phi, Zephyr, Granite, Falcon
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start_of_role|>", "<|end_of_role|>"),
    # gpt-oss (harmony)
    *(
        "<|start|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|constrain|>",
        "<|startoftext|>",
    ),
    *("<|endofprompt|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    # DeepSeek
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    # Command R
    *("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)


def find_control_tokens(text: str, tokens: Sequence[str] = KNOWN_CONTROL_TOKENS) -> list[str]:
    """The tokens that stand in `text`, each once, in the order of sight."""
    finder = _make_finder(tuple(tokens))
    if finder is None:
        return []
    openings, regex = finder
    for opening in openings:
        if opening in text:
            return list(dict.fromkeys(regex.findall(text)))
    return []


@lru_cache(maxsize=64)
def _make_finder(tokens: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]] | None:
    """The characters that tokens begin with, and one expression for all: the longest is tried first."""
    wanted = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    if not wanted:
        return None
    openings = tuple(sorted({token[0] for token in wanted}))
    by_opening = "|".join(
        re.escape(opening)
        + "(?:"
        + "|".join(re.escape(token[1:]) for token in wanted if token[0] == opening)
        + ")"
        for opening in openings
    )
    return openings, re.compile(by_opening)
