"""All kept rows to shards: what an earlier run rendered is taken as it is, the rest is rendered.

In: the corpus, the places of the kept rows, what each model gets of them. Out: for each segment its
shards and the rows that were refused. Shards are named by all that went into them; those that nothing
needs any more are removed here, and live on in the datasets that hold them.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graftwork.data.assemble import Placed
from graftwork.data.corpus import Corpus
from graftwork.data.dealing import Dealing
from graftwork.data.portions import Portion
from graftwork.data.ports import Progress, Renderer
from graftwork.data.render import RenderedBlock, RenderTask, Share, begin, find_rendered, render_block
from graftwork.data.settings import DataSettings
from graftwork.process.pool import work_in_order
from graftwork.records.base import fingerprint

SHARDS_FORM = 3
"""Counts up when shards change their form: older ones are then rendered anew."""

RENDERED_BY = (
    *("system_prompt", "system_prompts", "logged_system_prompt", "train_on", "max_tokens", "overlong"),
)
"""The settings that a rendered row depends on; which rows are rendered is hashed beside them."""


class Rendering(NamedTuple):
    """A rendered segment: where its shards lie, and from row numbers in the block to places."""

    block: RenderedBlock
    folder: Path
    offset: int

    @property
    def refused(self) -> dict[int, str]:
        return {number + self.offset: reason for number, reason in self.block.refused.items()}

    @property
    def shortened(self) -> dict[int, str]:
        return {number + self.offset: reason for number, reason in self.block.shortened.items()}

    def placed(self, model: str, dealing: Dealing) -> Iterator[Placed]:
        for shard in self.block.shards:
            if shard.model == model:
                yield Placed(shard, self.folder, dealing.group[shard.numbers + self.offset])


class _Task(NamedTuple):
    render: RenderTask
    offset: int


def render_corpus(
    corpus: Corpus,
    places: "np.ndarray[Any, np.dtype[np.int64]]",
    portions: Sequence[Portion],
    *,
    staged: Collection[str],
    renderer: Renderer,
    settings: DataSettings,
    folder: Path,
    report: Progress,
    processes: int | None,
) -> list[Rendering]:
    """Every segment in order. `staged` names the models whose rows carry their stage."""
    ground = fingerprint(
        [
            renderer.template_fingerprint,
            renderer.tokenizer_fingerprint,
            settings.model_dump(mode="json", include=set(RENDERED_BY)),
            SHARDS_FORM,
        ]
    )
    tasks = list(_list_tasks(corpus, places, portions, staged=staged, ground=ground, folder=folder))
    known = {task.render.out: find_rendered(task.render.out) for task in tasks}
    done = sum(len(task.render.numbers) for task in tasks if known[task.render.out])
    new = [task.render for task in tasks if known[task.render.out] is None]
    blocks = work_in_order(
        new, render_block, prepare=begin, with_arguments=(renderer, settings), processes=processes
    )
    report("render", done, len(places))
    for render, rendered in zip(new, blocks, strict=True):
        known[render.out] = rendered
        done += len(render.numbers)
        report("render", done, len(places))
    _forget_others(folder, keep=set(known))
    return [
        Rendering(block, task.render.out, task.offset)
        for task in tasks
        if (block := known[task.render.out]) is not None
    ]


def _list_tasks(
    corpus: Corpus,
    places: "np.ndarray[Any, np.dtype[np.int64]]",
    portions: Sequence[Portion],
    *,
    staged: Collection[str],
    ground: str,
    folder: Path,
) -> Iterator[_Task]:
    for first, segment in corpus.by_segment():
        low, high = np.searchsorted(places, [first, first + segment.stop - segment.start])
        if low == high:
            continue
        offset = first - segment.start
        numbers = places[low:high] - offset
        shares = {
            portion.name: Share(portion.split[low:high], portion.weight[low:high], portion.name in staged)
            for portion in portions
        }
        decided = [
            [name, share.split.tobytes().hex(), share.weight.tobytes().hex(), share.staged]
            for name, share in shares.items()
        ]
        place = [segment.sifted, segment.file, segment.first_line, numbers.tobytes().hex()]
        task = RenderTask(
            sifted=corpus.path_of(segment),
            numbers=numbers,
            file=segment.file,
            first_line=segment.first_line,
            shares=shares,
            out=folder / fingerprint([ground, place, decided])[:40],
        )
        yield _Task(task, offset)


def _forget_others(folder: Path, *, keep: set[Path]) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        if path not in keep:
            shutil.rmtree(path, ignore_errors=True)
