"""Model subsets: the rows, splits and weights that each model under `models:` gets.

Input: columns of the kept rows, and the settings. Output: per model one value per row, and warnings about
settings that match no row. Held-out rows are held out for every model. Draws use a hash and the seed, so rows
that are logged later change little.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork.data.corpus.store import Corpus
from graftwork.data.dedup.fingerprints import SPLIT_FIELDS
from graftwork.data.settings import DataSettings, Keep, ModelSettings
from graftwork.records.dataset import SubsetSummary
from graftwork.records.errors import UserError
from graftwork.text.similarity import spread

TRAIN, VALIDATION, TEST = 0, 1, 2
"""Indexes into SPLITS."""
RL = 3
NOT_SELECTED = 255

Mask = npt.NDArray[np.bool_]


class KeptRows(NamedTuple):
    """Columns of the rows that were assigned to a split.

    `role` and `domain` index their lists of names, -1 for none, as for `stage`. `group` is a number that
    rows of one question share; `key` is the row's content hash; `taught` marks rows that a teacher answered;
    `weight` is that of the row's score.
    """

    role: npt.NDArray[np.int32]
    role_names: list[str]
    domain: npt.NDArray[np.int32]
    domain_names: list[str]
    stage: npt.NDArray[np.int32]
    split: npt.NDArray[np.uint8]
    group: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    taught: Mask | None = None
    weight: npt.NDArray[np.float64] | None = None


class ModelSubset(NamedTuple):
    """One model's rows.

    `split` indexes SPLITS, or is RL or NOT_SELECTED. `own` is False for replayed rows and for rows that are
    not selected. `weight` is how often a row is trained on per epoch: 0 if not selected, 1 if held out.
    """

    name: str
    split: npt.NDArray[np.uint8]
    own: Mask
    weight: npt.NDArray[np.float64]


def select_subsets(facts: KeptRows, models: dict[str, ModelSettings], *, seed: int) -> list[ModelSubset]:
    subsets = []
    for name, settings in models.items():
        selected = _find_own(facts, name, settings.keep)
        excluded = selected
        if facts.taught is not None and not settings.repaired:
            selected, excluded = selected & ~facts.taught, selected | facts.taught
        split = np.where(selected, facts.split, np.uint8(NOT_SELECTED))
        # About this share of the groups, independently of which other groups there are.
        drawn = _mix(facts.group.astype(np.int64).view(np.uint64), purpose="rl", seed=seed)
        reserved = selected & (facts.split == TRAIN) & (drawn < np.uint64(int(settings.rl * 2**64)))
        split[reserved] = RL
        split[_draw_replay(facts, settings.replay, excluded=excluded, apart=reserved, seed=seed)] = TRAIN
        subsets.append(ModelSubset(name, split, selected, _weigh(facts, settings.weights, split)))
    return subsets


def summarize_subsets(subsets: list[ModelSubset], facts: KeptRows) -> list[SubsetSummary]:
    summaries = []
    for subset in subsets:
        trained = subset.split == TRAIN
        stages, counts = np.unique(facts.stage[trained], return_counts=True)
        by_stage = dict(zip(stages.tolist(), counts.tolist(), strict=True))
        rows = {split: int(np.count_nonzero(subset.split == split)) for split in (VALIDATION, TEST, RL)}
        summary = SubsetSummary(
            model=subset.name,
            own=int(np.count_nonzero(trained & subset.own)),
            replayed=int(np.count_nonzero(trained & ~subset.own)),
            rl=rows[RL],
            validation=rows[VALIDATION],
            test=rows[TEST],
            without_stage=by_stage.pop(-1, 0),
            stages=by_stage,
            rows_per_epoch=float(subset.weight[trained].sum()),
        )
        summaries.append(summary)
    return summaries


def find_unmatched(facts: KeptRows, models: dict[str, ModelSettings]) -> list[tuple[str, str]]:
    """List every key and value under `models:` that no row has: perhaps a typo."""
    occurring = _values_that_occur(facts)
    unmatched: list[tuple[str, str]] = []
    for name, settings in models.items():
        for key, values in settings.keep:
            unmatched += [(f"models.{name}.keep.{key}", str(v)) for v in values if v not in occurring[key]]
        strangers = [role for role in settings.weights if role not in occurring["role"]]
        unmatched += [(f"models.{name}.weights", role) for role in strangers]
    return unmatched


def _find_own(facts: KeptRows, name: str, keep: Keep) -> Mask:
    """Select the rows that a model is trained and evaluated on, in every split."""
    selected = np.ones(len(facts.split), dtype=np.bool_)
    values_by_key = _values_that_occur(facts)
    for key, values in keep:
        if not values:
            continue
        if key == "stage":
            # -1 means none and cannot be selected.
            matches = np.isin(facts.stage, [stage for stage in values if int(stage) >= 0])
        else:
            column, names = (
                (facts.role, facts.role_names) if key == "role" else (facts.domain, facts.domain_names)
            )
            matches = np.isin(column, [number for number, value in enumerate(names) if value in values])
        if not matches.any():
            occurring = [str(value) for value in values_by_key[key]]
            listed = ", ".join(occurring[:20]) + (" …" if len(occurring) > 20 else "")
            raise UserError(
                f"models.{name}.keep.{key} matches no row: {', '.join(str(value) for value in values)}",
                why=f"the {key}s of the kept rows are: {listed}"
                if values_by_key[key]
                else f"no kept row states a {key}",
                fix=f"use one of these, or leave {key!r} out" if values_by_key[key] else f"leave {key!r} out",
                where=f"models.{name}.keep.{key}",
            )
        selected &= matches
    if not selected.any() and any(values for _, values in keep):
        keys = [key for key, values in keep if values]
        raise UserError(
            f"models.{name}.keep matches no row",
            why=f"each of {', '.join(keys)} matches some rows, and no row matches all of them",
            fix="specify fewer keys; `graft data audit` shows which roles and domains the logs have",
            where=f"models.{name}.keep",
        )
    return selected


def _values_that_occur(facts: KeptRows) -> dict[str, list[str] | list[int]]:
    """Return the values that occur, by key of `keep`."""
    roles, domains, stages = (
        np.unique(column).tolist() for column in (facts.role, facts.domain, facts.stage)
    )
    return {
        "role": sorted(facts.role_names[number] for number in roles if number >= 0),
        "domain": sorted(facts.domain_names[number] for number in domains if number >= 0),
        "stage": [stage for stage in stages if stage >= 0],
    }


def _draw_replay(facts: KeptRows, share: float, *, excluded: Mask, apart: Mask, seed: int) -> Mask:
    """Draw training rows of other models so that they make up `share` of this model's, or all there are.

    Rows with the smallest hashes are drawn, so a row that is logged later replaces few. Rows that share a
    question with an RL row are not drawn.
    """
    drawn = np.zeros(len(excluded), dtype=np.bool_)
    candidates = np.flatnonzero((facts.split == TRAIN) & ~excluded)
    if apart.any():
        candidates = candidates[~np.isin(facts.group[candidates], np.unique(facts.group[apart]))]
    learned = int(np.count_nonzero(excluded & ~apart & (facts.split == TRAIN)))
    count = min(round(learned * share / (1 - share)), len(candidates))
    if count == 0:
        return drawn
    hashes = _mix(facts.key[candidates], purpose="replay", seed=seed)
    limit = np.partition(hashes, count - 1)[count - 1]
    below = hashes < limit
    ties = np.flatnonzero(hashes == limit)[: count - int(np.count_nonzero(below))]
    drawn[candidates[below]] = True
    drawn[candidates[ties]] = True
    return drawn


def _weigh(
    facts: KeptRows, weights: dict[str, float], split: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float64]:
    # The last element is for rows without a role: index -1.
    by_role = np.array([weights.get(name, 1.0) for name in facts.role_names] + [1.0])
    held_out = (split == VALIDATION) | (split == TEST)
    stated = by_role[facts.role] if facts.weight is None else by_role[facts.role] * facts.weight
    weight = np.where(held_out, 1.0, stated)
    weight[split == NOT_SELECTED] = 0.0
    return weight


def _mix(values: npt.NDArray[np.uint64], *, purpose: str, seed: int) -> npt.NDArray[np.uint64]:
    """Hash each value to 64 bits, differently per purpose and seed."""
    salt = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:8]
    return spread(values ^ np.uint64(int.from_bytes(salt)))


SAMPLED_ROWS = 200


def require_split_key(corpus: Corpus, passed: "np.ndarray[Any, Any]", *, settings: DataSettings) -> list[str]:
    """Refuse a `data.split_by` key that no row has; warn about rows that lack it."""
    if settings.split_by == "question" or not passed.any():
        return []
    lacking = int((passed & (corpus.column("together") == 0)).sum())
    if lacking == int(passed.sum()):
        positions = np.flatnonzero(passed)[:SAMPLED_ROWS].tolist()
        rows = [row for _, row in corpus.rows_at(positions)]
        fields = [name for name, field in SPLIT_FIELDS.items() if any(getattr(row, field) for row in rows)]
        keys = sorted({*fields, *(key for row in rows for key in row.extra)} - {"id"})[:20]
        raise UserError(
            f"no row has {settings.split_by!r}, the key in data.split_by",
            why="rows that belong together would be split without notice",
            fix=f"use one of: {', '.join(keys)}; or `question`",
            where="data.split_by",
        )
    if not lacking:
        return []
    return [f"data.split_by: {lacking:,} rows have no {settings.split_by!r}; they are split by question"]


def find_setting_warnings(
    facts: KeptRows, *, settings: DataSettings, models: Mapping[str, ModelSettings]
) -> list[str]:
    """Warn about settings that name something no kept row has."""
    warnings = [f"{key}: no kept row has {value!r}" for key, value in find_unmatched(facts, dict(models))]
    roles = {facts.role_names[number] for number in np.unique(facts.role).tolist() if number >= 0}
    warnings += [
        f"data.system_prompts: no kept row has the role {role!r}"
        for role in settings.system_prompts
        if role not in roles
    ]
    if not (facts.stage >= 0).any():
        warnings += [
            f"models.{name}.curriculum: no kept row has a stage"
            for name, model in models.items()
            if model.curriculum
        ]
    return warnings
