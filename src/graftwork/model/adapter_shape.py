"""The shape of what is learned, and the PEFT config that says the same. Pure; needs no torch.

Input: settings, or an adapter_config.json. Output: which layers get an adapter, of which rank, acting how
strongly. Patterns mean what they mean in PEFT: the end of a layer's path.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.errors import Corrupted, UserError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

Kind = Literal["lora", "dora", "full"]
NOT_SERVED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""Features of an adapter that vLLM refuses, by PEFT's names."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates memory for; an adapter uses the next one above its own."""
_LARGEST_RANK = 2**20
_REPETITION, _REPEATED_GROUP = re.compile(r"[*+{]|(?<!\()\?"), re.compile(r"\)[*+{?]")


class AdapterShape(Record):
    """Which linear layers get an adapter, and of what rank. With `kind` full, the weights of `layers`
    themselves are trained; then there is no rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    ranks: dict[str, int] = {}
    """Other ranks, by the names of layers."""
    alphas: dict[str, float] = {}
    use_rslora: bool = False
    """Scales with alpha / √rank, so that higher ranks learn as fast as lower ones (rsLoRA)."""
    kind: Kind = "lora"
    experts: bool = False
    """The experts of the chosen layers have adapters too."""

    def wants(self, path: str) -> bool:
        return any(path == target or path.endswith(f".{target}") for target in self.targets)

    def rank_of(self, path: str) -> int:
        return next((rank for name, rank in self.ranks.items() if _is_meant(name, path)), self.rank)

    def scale_of(self, path: str) -> float:
        alpha = next((alpha for name, alpha in self.alphas.items() if _is_meant(name, path)), self.alpha)
        rank = self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def require_names(wanted: Iterable[str], allowed: Iterable[str], *, setting: str, where: str = "") -> None:
    """Refuse a name that matches no linear layer of the model, and suggest the nearest."""
    names = sorted(set(allowed))
    for name in wanted:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise UserError(
            f"no layer of the model is named {name!r}",
            why=f"its linear layers are {', '.join(names) or 'none'}",
            fix=f"did you mean {near[0]!r}?" if near else f"set `{setting}` to names of its linear layers",
            where=where or setting,
        )


def to_peft(
    shape: AdapterShape, base: str, *, transposed: bool = False, parameters: Sequence[str] = ()
) -> dict[str, Any]:
    """adapter_config.json, as PEFT and vLLM read it. `parameters` are the stacked weights of experts."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": shape.use_rslora,
        "use_dora": shape.kind == "dora",
        "rank_pattern": dict(shape.ranks),
        "alpha_pattern": dict(shape.alphas),
        "target_modules": list(shape.targets),
        "layers_to_transform": list(shape.layers),
        "layers_pattern": None,
        "modules_to_save": None,
        **({"target_parameters": list(parameters)} if parameters else {}),
    }


def parse_peft(text: bytes, *, where: str) -> dict[str, Any]:
    """The content of an adapter_config.json from any source."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_shape(str(error), where) from error
    if not isinstance(config, dict):
        raise _no_shape("it is not an object", where)
    return config


def from_peft(config: dict[str, Any], *, layers: int, paths: Iterable[str], where: str) -> AdapterShape:
    """Return the shape of a PEFT folder. `paths` are the layers that its weights name."""
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"an adapter of the kind {config.get('peft_type')} cannot be loaded",
            why="only LoRA, rsLoRA and DoRA adapters can",
            fix="merge the adapter into its base and serve that",
            where=where,
        )
    indices = config.get("layers_to_transform")
    try:
        targets = config["target_modules"] or ()
        if isinstance(targets, str) or config.get("exclude_modules"):
            # A pattern of any kind: the weights say which layers it met.
            targets = sorted(paths)
        shape = AdapterShape(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(targets),
            layers=tuple(
                range(layers) if indices is None else [indices] if isinstance(indices, int) else indices
            ),
            ranks=config.get("rank_pattern") or {},
            alphas=config.get("alpha_pattern") or {},
            use_rslora=bool(config.get("use_rslora")),
            kind="dora" if config.get("use_dora") else "lora",
            experts=bool(config.get("target_parameters")),
        )
    except KeyError as missing:
        raise _no_shape(f"it has no {missing.args[0]}", where) from missing
    except (TypeError, ValueError) as error:
        raise _no_shape(str(error).splitlines()[0], where) from error
    _require_usable(shape, where)
    return shape


def _require_usable(shape: AdapterShape, where: str) -> None:
    """Check that numbers are finite and patterns terminate."""
    ranks, alphas = (shape.rank, *shape.ranks.values()), (shape.alpha, *shape.alphas.values())
    if not all(0 < rank <= _LARGEST_RANK for rank in ranks):
        raise _no_shape(f"a rank is not between 1 and {_LARGEST_RANK:,}", where)
    if not all(math.isfinite(alpha) for alpha in alphas):
        raise _no_shape("an alpha is not a finite number", where)
    for name in (*shape.ranks, *shape.alphas):
        try:
            re.compile(name)
        except (re.error, RecursionError, OverflowError) as error:
            raise _no_shape(f"{name[:80]!r} is not a pattern", where) from error
        # A repeated group, or many repetitions, can take exponential time.
        if _REPEATED_GROUP.search(name) or len(_REPETITION.findall(name)) > 3 or len(name) > 500:
            raise _no_shape(f"the pattern {name[:80]!r} repeats too much", where)


def _no_shape(why: str, where: str) -> Corrupted:
    return Corrupted(
        "adapter_config.json does not describe an adapter that can be used",
        why=why,
        fix="write the adapter again with `save_pretrained`",
        where=where,
    )


def _is_meant(name: str, path: str) -> bool:
    """PEFT's own rule: a name or a pattern that matches the end of the path."""
    return re.match(rf"(.*\.)?({name})$", path) is not None


def lora_rank(folder: Path) -> int | None:
    """Return the memory that vLLM must reserve for the adapter; None for one that it cannot serve."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in NOT_SERVED):
        return None
    largest = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((rank for rank in RANKS if rank >= largest), None)
