"""A base model of random weights in a folder, as `save_pretrained` writes one, for the GPU benchmarks.

Speed does not depend on the values of the weights, and a GPU machine without a network has no others.
Loaders that insist on a tokenizer get a small one, byte by byte.

    python benchmarks/train_gpu_model.py [--shape qwen2.5-7b] [--folder FOLDER]    # 15 GB, needs a GPU
"""

import argparse
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """The measures of a decoder, and the work that a token is in a LoRA step on it."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    family: Literal["qwen2", "llama"] = "qwen2"
    positions: int = 32_768
    rope_theta: float = 1_000_000.0

    def step_flops(self, sequence: int) -> float:
        """FLOP a token: forward and the gradients of inputs (4 a weight), causal attention's 3.5 passes.

        Gradients of frozen weights are not computed, so they are not counted; nor is recomputation.
        """
        keys = self.hidden // self.heads * self.key_heads
        layer = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.inner
        weights = self.layers * layer + self.hidden * self.vocabulary
        attention = self.layers * 3.5 * 2 * 2 * sequence * self.hidden / 2
        return 4 * weights + attention


SHAPES = {
    "qwen2.5-7b": Shape(vocabulary=152_064, hidden=3584, inner=18_944, layers=28, heads=28, key_heads=4),
    "deepseek-coder-6.7b": Shape(
        vocabulary=32_256, hidden=4096, inner=11_008, layers=32, heads=32, key_heads=32,
        family="llama", positions=16_384, rope_theta=100_000.0,
    ),
    "tiny": Shape(vocabulary=512, hidden=64, inner=128, layers=2, heads=4, key_heads=2),
    "tiny-llama": Shape(vocabulary=512, hidden=64, inner=128, layers=2, heads=4, key_heads=4, family="llama"),
}  # fmt: skip


def default_folder(shape: str) -> Path:
    return Path(tempfile.gettempdir()) / f"random-{shape.replace('.', '-')}"


def make_model_folder(folder: Path, shape: str) -> None:
    """Make the folder whole or not at all; one that stands already is left as it is."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    measures = SHAPES[shape]
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[measures.family](
        vocab_size=measures.vocabulary,
        hidden_size=measures.hidden,
        intermediate_size=measures.inner,
        num_hidden_layers=measures.layers,
        num_attention_heads=measures.heads,
        num_key_value_heads=measures.key_heads,
        max_position_embeddings=measures.positions,
        rope_theta=measures.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(partial)
    _save_tokenizer(partial)
    partial.rename(folder)


def _save_tokenizer(folder: Path) -> None:
    """One token a byte, and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", model_max_length=32_768
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not asked.shape.startswith("tiny"):
        print("passed over: a model of this size is made on a GPU, and there is none here")
        return
    folder, begun = asked.folder or default_folder(asked.shape), time.perf_counter()
    make_model_folder(folder, asked.shape)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**30
    print(f"{folder}: {size:.1f} GiB, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
