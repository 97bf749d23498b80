"""A transformers folder made into a GGUF file by llama.cpp's own converter, and read back.

In: a folder, the path of a file. Out: the file, and what it says of itself. The converter is not
ours and is only run where the user has it: as a child process, with the same Python.
"""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from graftwork.model.headers import count_layers, read_sizes
from graftwork.records.errors import AnswerIsNo, EnvironmentLacks

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "GRAFT_GGUF_CONVERTER"
EXTRA_SHARE = 0.001
"""Converters may add small tensors of their own (factors of rotary positions); never more than this."""


def find_converter(folder: Path = Path()) -> Path:
    """The script that the user named, has on the path, or keeps in a checkout next to the project."""
    named = os.environ.get(VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise _lacks(f"{VARIABLE} names {named}, and there is no such file")
    on_path = shutil.which(CONVERTER)
    for candidate in (*([Path(on_path)] if on_path else []), folder / "llama.cpp" / CONVERTER):
        if candidate.is_file():
            return candidate
    raise _lacks(f"{CONVERTER} is neither on the path nor in {folder / 'llama.cpp'}")


def convert(folder: Path, target: Path, *, converter: Path) -> None:
    """Run the converter; its output type follows the weights' own."""
    command = [sys.executable, str(converter), str(folder), "--outfile", str(target), "--outtype", "auto"]
    # Some checkouts bring the reader and writer that fits them.
    own = converter.parent / "gguf-py"
    path = os.pathsep.join(filter(None, [str(own) if own.is_dir() else "", os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0 or not target.is_file():
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise EnvironmentLacks(
            "the converter to GGUF failed",
            why=" · ".join(last) or f"exit code {done.returncode}",
            fix="see whether it knows this kind of model, and `pip install gguf sentencepiece` for it",
            where=str(converter),
        )


def read_back(target: Path, folder: Path) -> dict[str, str | int | float]:
    """What the file says of itself, or a no where it does not hold the model that was converted."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentLacks(
            "the package gguf is not installed",
            why="a GGUF file is read back before it counts as written",
            fix="pip install gguf",
        ) from error
    reader: Any = GGUFReader(str(target))
    architecture = str(_field(reader, "general.architecture"))
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    sizes = read_sizes(folder)
    weights, layers = sum(map(math.prod, sizes.values())), count_layers(folder)
    blocks = int(_field(reader, f"{architecture}.block_count") or 0)
    found: dict[str, str | int | float] = {
        "architecture": architecture,
        "tensors": len(reader.tensors),
        "elements": elements,
        "blocks": blocks,
        "context_length": int(_field(reader, f"{architecture}.context_length") or 0),
        "embedding_length": int(_field(reader, f"{architecture}.embedding_length") or 0),
        "file_type": int(_field(reader, "general.file_type") or 0),
    }
    whole = weights <= elements <= weights * (1 + EXTRA_SHARE)
    if not whole or blocks != layers:
        raise AnswerIsNo(
            "the GGUF file does not hold the model that was converted",
            why=f"{elements} weights in {len(reader.tensors)} tensors and {blocks} blocks; the model has "
            f"{weights} in {len(sizes)} and {layers}",
            fix="use a converter that knows this kind of model",
            where=str(target),
        )
    return found


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _lacks(why: str) -> EnvironmentLacks:
    return EnvironmentLacks(
        "there is no converter to GGUF here",
        why=why,
        fix=f"get llama.cpp (`git clone https://github.com/ggml-org/llama.cpp`) into the project's folder, "
        f"or set {VARIABLE} to its {CONVERTER}",
    )
