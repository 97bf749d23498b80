"""graft.yaml, by its resolved settings: defaults and the parts of a model are in their places.

In: the settings as JSON and the written file for its lines. Out: a Configuration. Does not know how the
project is resolved.
"""

from typing import Any

from graftwork.plan.lint.facts import ConfigLocation, Configuration
from graftwork.plan.lint.written import WrittenConfig

GRAFT_FIELDS = {
    "model": ("base",),
    "method": ("train", "method"),
    "rank": ("train", "rank"),
    "alpha": ("train", "alpha"),
    "stabilised": ("train", "rank_stabilised"),
    "learning_rate": ("train", "learning_rate"),
    "epochs": ("train", "epochs"),
    "batch": ("train", "batch_rows"),
    "cards": ("train", "processes"),
    "warmup_share": ("train", "warmup_share"),
    "save_steps": ("train", "checkpoint_every"),
    "eval_steps": ("train", "examine", "every"),
    "best_metric": ("train", "examine", "metric"),
    "max_length": ("data", "max_tokens"),
    "offload_optimizer": ("train", "offload"),
    "mirror": ("train", "run", "mirror"),
    "deadline_minutes": ("train", "run", "deadline_minutes"),
    "precision": ("train", "precision"),
    "packing": ("train", "packing"),
    "targets": ("train", "targets"),
    "ram_gib": ("plan", "memory_limit_gib"),
}


def read_graft(settings: dict[str, Any], written: WrittenConfig, *, model: str = "") -> Configuration:
    """`settings` are those of `model`; its own keys are looked for first."""
    values: dict[str, Any] = {}
    places: dict[str, ConfigLocation] = {}
    for field, path in GRAFT_FIELDS.items():
        value = _at(settings, path)
        if value is not None:
            values[field] = value
            places[field] = _place(written, path, model)
    if values.get("precision") == "auto":
        del values["precision"], places["precision"]
    # Packed rows never see each other here, whatever the switch says.
    values["packing"], values["document_masks"] = values.get("packing") != "off", True
    if values.get("targets") == "all":
        del values["targets"]
    values["save_when"] = "steps"
    examine = _at(settings, ("train", "examine")) or {}
    values["eval_when"] = "steps" if examine.get("every") else "no"
    values["stops_early"] = examine.get("patience") is not None
    values["zero_stage"] = {"zero2": 2, "zero3": 3, "fsdp": 3}.get(str(_at(settings, ("train", "strategy"))))
    values["target_rate"] = _highest_rate(settings)
    places["target_rate"] = _place(written, ("gate", "rules"), model)
    return Configuration.model_validate(
        {
            **values,
            "file": written.file,
            "kind": "graft",
            "places": {k: v for k, v in places.items() if v.line},
        }
    )


def _highest_rate(settings: dict[str, Any]) -> float | None:
    """The strictest rate of the gate that is held by the lower bound of its interval."""
    rules = _at(settings, ("gate", "rules")) or []
    rates = [
        rule["over"]
        for rule in rules
        if rule.get("over") is not None and 0 < rule["over"] < 1 and rule.get("bound") in (None, "lower")
    ]
    return max(rates, default=None)


def _at(settings: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _place(written: WrittenConfig, path: tuple[str, ...], model: str) -> ConfigLocation:
    for tried in (("models", model, *path), path):
        leaf = written.leaves.get(tried)
        if leaf is not None:
            return ConfigLocation(key=".".join(tried), line=leaf.line)
    return ConfigLocation(key=".".join(path))
