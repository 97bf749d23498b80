"""What the headers of safetensors files say of a model: the sizes of its tensors, without loading one.

In: a folder. Out: sizes by name; of those, the linear layers of a block and how many parameters there
are. Works for any decoder whose blocks are numbered. Needs no torch.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from graftwork.files.safetensors import read_header
from graftwork.records.errors import Damaged

BLOCK = re.compile(r"^(?:.*?\.)?(\d+)\.(.+)$")
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Small linear layers that choose between experts: an adapter there unsettles the choice."""


def count_layers(folder: Path) -> int:
    """Blocks, as the folder's config states them."""
    config = json.loads((folder / "config.json").read_text())
    return int(next((config[key] for key in ("num_hidden_layers", "n_layer") if key in config), 0))


def read_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the folder."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        entries = read_header(path, fix="fetch the model again")
        try:
            found |= {name: tuple(entry["shape"]) for name, entry in entries.items() if "shape" in entry}
        except TypeError as error:
            raise Damaged(
                f"{path.name} states no shapes", fix="fetch the model again", where=str(path)
            ) from error
    return found


def count_tensors(
    sizes: Mapping[str, tuple[int, ...]], *, tied: bool, transposed: bool = False
) -> tuple[dict[str, tuple[int, int]], int, int] | None:
    """Of a decoder's tensors: (inputs, outputs) of the linear layers of its top block, by the shortest end of
    the path that says which one is meant; the parameters of that block; all parameters. None where no blocks
    are numbered.

    `transposed`: its weights are kept as [in, out], as those of GPT-2.
    """
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    total = 0
    for name, shape in sizes.items():
        if len(shape) > 3 or (tied and name.startswith("lm_head.")):
            continue  # Masks that old files carry, and a head that is the embedding again.
        total += math.prod(shape)
        match = BLOCK.match(name)
        if match:
            blocks.setdefault(int(match[1]), {})[match[2]] = shape
    if not blocks:
        return None
    top = blocks[max(blocks)]
    # Experts are one tensor in memory, and no linear layers.
    weights = {
        path.removesuffix(".weight"): shape
        for path, shape in top.items()
        if path.endswith(".weight") and len(shape) == 2 and not {"experts", "router"} & set(path.split("."))
    }
    leaves = [path.rsplit(".", 1)[-1] for path in weights]
    linears: dict[str, tuple[int, int]] = {}
    for path, shape in sorted(weights.items()):
        leaf = path.rsplit(".", 1)[-1]
        if leaf not in ROUTERS:
            inputs, outputs = shape if transposed else (shape[1], shape[0])
            linears[leaf if leaves.count(leaf) == 1 else path] = (inputs, outputs)
    return linears, sum(map(math.prod, top.values())), total
