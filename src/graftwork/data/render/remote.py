"""The rendering of blocks on another node.

In: a `RenderTask`; the chat template and the tokenizer as text, once a process. Out: shards in the shared
folder, the same bytes as on this machine. A renderer of another package renders here.
"""

from pathlib import Path
from typing import Any

import numpy as np

from graftwork.data.corpus.remote import NOT_SENT
from graftwork.data.corpus.store import JoinedFacts
from graftwork.data.render.rendered import RenderedBlock, find_rendered
from graftwork.data.render.rows import (
    Renderer,
    RenderTask,
    SubsetRows,
    init_worker,
    render_block,
)
from graftwork.data.settings import DataSettings
from graftwork.process.cluster.pieces import RemoteWork, pack


def remote_rendering(
    renderer: Renderer, settings: DataSettings
) -> RemoteWork[RenderTask, RenderedBlock] | None:
    """The form for a cluster; None for a renderer that is no `ChatTemplate`."""
    from graftwork.model.chat.template import ChatTemplate

    if not isinstance(renderer, ChatTemplate):
        return None
    parts = renderer.as_texts()
    head = {"settings": settings.model_dump(mode="json", exclude=NOT_SENT), "reasoning": parts.reasoning}
    texts = (parts.tokenizer_json, parts.config, parts.chat_template)
    return RemoteWork(
        entry="graftwork.data.render.remote:render_piece",
        shared=pack(head, *(text.encode() for text in texts)),
        encode=_encode,
        collect=lambda task: find_rendered(task.out),
    )


def prepare_shared(head: Any, blobs: list[bytes]) -> None:
    from graftwork.model.chat.template import ChatTemplate

    tokenizer_json, config, chat_template = (blob.decode() for blob in blobs)
    renderer = ChatTemplate.from_texts(tokenizer_json, config, chat_template, head["reasoning"])
    init_worker(renderer, DataSettings.model_validate(head["settings"]))


def render_piece(_context: None, head: Any, blobs: list[bytes]) -> None:
    """Work on one block, on a node."""
    if find_rendered(Path(head["out"])) is not None:
        return
    arrays = iter(blobs[1:])
    subsets = {
        name: SubsetRows(
            np.frombuffer(next(arrays), dtype=np.uint8), np.frombuffer(next(arrays), dtype=np.float64), staged
        )
        for name, staged in head["subsets"]
    }
    render_block(
        RenderTask(
            features=Path(head["features"]),
            numbers=np.frombuffer(blobs[0], dtype=np.int64),
            file=head["file"],
            first_line=head["first_line"],
            subsets=subsets,
            out=Path(head["out"]),
            joined={at: JoinedFacts(*facts) for at, *facts in head["joined"]},
        )
    )


def _encode(task: RenderTask) -> bytes:
    head = {
        "features": str(task.features.absolute()),
        "file": task.file,
        "first_line": task.first_line,
        "subsets": [[name, subset.staged] for name, subset in task.subsets.items()],
        "out": str(task.out.absolute()),
        "joined": [[at, *facts] for at, facts in task.joined.items()],
    }
    arrays = [np.ascontiguousarray(task.numbers, dtype=np.int64).tobytes()]
    for subset in task.subsets.values():
        arrays.append(np.ascontiguousarray(subset.split, dtype=np.uint8).tobytes())
        arrays.append(np.ascontiguousarray(subset.weight, dtype=np.float64).tobytes())
    return pack(head, *arrays)
