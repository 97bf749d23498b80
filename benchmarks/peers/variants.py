"""The settings that each peer is measured at; what may win under a cap comes first."""

from dataclasses import dataclass
from typing import Literal

SEQUENCE, RANK, ALPHA = 2048, 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_STEPS, TIMED_STEPS = 4, 8


@dataclass(frozen=True)
class Variant:
    """One peer at one setting. `checkpointed`: the peer's own activation checkpointing, all layers."""

    peer: Literal["unsloth", "hf", "trl"]
    rows: int
    nf4: bool = False
    checkpointed: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        parts = [self.peer, "liger" if self.liger else "", "qlora" if self.nf4 else "lora"]
        parts += ["gc" if self.checkpointed else "none", f"mb{self.rows}"]
        return "-".join(part for part in parts if part)


_ORDERED = (
    Variant("unsloth", 4, nf4=True, checkpointed=True),
    Variant("unsloth", 1, nf4=True),
    Variant("unsloth", 2, nf4=True),
    Variant("unsloth", 4),
    Variant("unsloth", 2),
    Variant("unsloth", 1),
    Variant("unsloth", 4, checkpointed=True),
    Variant("unsloth", 1, nf4=True, checkpointed=True),
    Variant("hf", 4, liger=True),
    Variant("hf", 4, liger=True, nf4=True, checkpointed=True),
    Variant("trl", 4, liger=True, checkpointed=True),
    Variant("trl", 4, checkpointed=True),
    Variant("hf", 4, liger=True, checkpointed=True),
    Variant("hf", 4, checkpointed=True),
    Variant("trl", 4, liger=True),
    Variant("hf", 1, liger=True),
    Variant("hf", 1),
    Variant("hf", 1, liger=True, nf4=True),
    # Not in the published tables: does a larger micro-batch help the peers where memory allows it?
    Variant("unsloth", 8),
    Variant("unsloth", 4, nf4=True),
    Variant("unsloth", 8, nf4=True, checkpointed=True),
    Variant("unsloth", 16),
)
VARIANTS = {variant.name: variant for variant in _ORDERED}
