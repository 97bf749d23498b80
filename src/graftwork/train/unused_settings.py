"""Settings that are given and have no effect with the objective that is chosen. Pure."""

from graftwork.train.objective_settings import OBJECTIVE_SETTINGS, USED_BY
from graftwork.train.settings import TrainSettings


def given_settings(train: TrainSettings) -> set[str]:
    """Of the settings that only some objectives use, those that differ from their defaults."""
    defaults = type(train)()
    names = (name for name in OBJECTIVE_SETTINGS if name != "objective")
    return {name for name in names if getattr(train, name) != getattr(defaults, name)}


def why_unused(name: str) -> str:
    """Why a setting has no effect: the objectives that it belongs to."""
    owners = [objective for objective, used in USED_BY.items() if name in used]
    return f"only `objective: {'` and `'.join(owners)}` uses it: remove it, or change the objective"


def describe_idle(train: TrainSettings) -> list[str]:
    """Settings that are given and change nothing with this objective, each in a sentence."""
    found: list[str] = []
    if train.objective == "orpo" and train.preferences.sft:
        found.append("preferences.sft has no effect with orpo, whose loss has a supervised term already")
    if train.objective == "kto" and train.preferences.sft:
        found.append("preferences.sft has no effect with kto, whose loss has no supervised term")
    if train.objective in ("dpo", "orpo"):
        usual = type(train.preferences)()
        names = ("undesirable", "least_score")
        given = [name for name in names if getattr(train.preferences, name) != getattr(usual, name)]
        if given:
            found.append(f"preferences.{', '.join(given)}: no effect with {train.objective}, only with kto")
    if train.objective != "grpo":
        return found
    if train.rollouts.updates == 1 and train.policy.loss != "grpo":
        found.append(
            f"policy.loss: {train.policy.loss} has no effect with one update per batch: every ratio is 1"
        )
    defaults = type(train)()
    rows = [
        name
        for name in ("epochs", "batch_rows", "max_rows")
        if getattr(train, name) != getattr(defaults, name)
    ]
    if rows and not train.mix.sft:
        found.append(f"{', '.join(rows)}: no effect, because grpo without a mix trains on no supervised rows")
    return found
