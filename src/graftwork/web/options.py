"""What `graft ui` was started with."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WebOptions:
    root: Path
    allow_actions: bool = False
