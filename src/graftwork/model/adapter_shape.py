"""The shape of what is learned, and the PEFT config that says the same. Pure; needs no torch.

In: settings, or an adapter_config.json. Out: which layers get an adapter, of which rank, acting how
strongly. Patterns mean what they mean in PEFT: the end of a layer's path.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.errors import UserMistake

Kind = Literal["lora", "dora", "full"]


class AdapterShape(Record):
    """Which linear layers get an adapter, and of what rank.

    `kind` full means that the weights of `layers` themselves are learned; then there is no rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    ranks: dict[str, int] = {}
    """Other ranks, by the names of layers."""
    alphas: dict[str, float] = {}
    stabilised: bool = False
    """Scales with alpha / √rank, so that higher ranks learn as fast as lower ones (rsLoRA)."""
    kind: Kind = "lora"

    def wants(self, path: str) -> bool:
        return any(path == target or path.endswith(f".{target}") for target in self.targets)

    def rank_of(self, path: str) -> int:
        return next((rank for name, rank in self.ranks.items() if _is_meant(name, path)), self.rank)

    def scale_of(self, path: str) -> float:
        alpha = next((alpha for name, alpha in self.alphas.items() if _is_meant(name, path)), self.alpha)
        rank = self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.stabilised else rank)


def require_names(wanted: Iterable[str], known: Iterable[str], *, setting: str, where: str = "") -> None:
    """Refuse a name that no linear layer of the model has, with the nearest that one has."""
    names = sorted(set(known))
    for name in wanted:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise UserMistake(
            f"no layer of the model is named {name!r}",
            why=f"its linear layers are {', '.join(names) or 'none'}",
            fix=f"did you mean {near[0]!r}?" if near else f"set `{setting}` to names of its linear layers",
            where=where or setting,
        )


def to_peft(shape: AdapterShape, base: str, *, transposed: bool = False) -> dict[str, Any]:
    """adapter_config.json, as PEFT and vLLM read it."""
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
        "use_rslora": shape.stabilised,
        "use_dora": shape.kind == "dora",
        "rank_pattern": dict(shape.ranks),
        "alpha_pattern": dict(shape.alphas),
        "target_modules": list(shape.targets),
        "layers_to_transform": list(shape.layers),
        "layers_pattern": None,
        "modules_to_save": None,
    }


def from_peft(config: dict[str, Any], *, layers: int, paths: Iterable[str], where: str) -> AdapterShape:
    """The shape that a PEFT folder has. `paths` are the layers that its weights name."""
    if config.get("peft_type") != "LORA":
        raise UserMistake(
            f"an adapter of the kind {config.get('peft_type')} cannot be loaded",
            why="only LoRA, rsLoRA and DoRA adapters can",
            fix="merge the adapter into its base and serve that",
            where=where,
        )
    chosen = config.get("layers_to_transform")
    targets = config["target_modules"]
    if isinstance(targets, str) or config.get("exclude_modules"):
        # A pattern of any kind: the weights say which layers it met.
        targets = sorted(paths)
    return AdapterShape(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=tuple(targets),
        layers=tuple(range(layers) if chosen is None else [chosen] if isinstance(chosen, int) else chosen),
        ranks=config.get("rank_pattern") or {},
        alphas=config.get("alpha_pattern") or {},
        stabilised=bool(config.get("use_rslora")),
        kind="dora" if config.get("use_dora") else "lora",
    )


def _is_meant(name: str, path: str) -> bool:
    """PEFT's own rule: a name or a pattern, met at the end of the path."""
    return re.match(rf"(.*\.)?({name})$", path) is not None
