"""The extraction of row features on another node: blocks of logs as bytes.

In: a `FeatureTask`. Out: the feature file in the shared folder, the same bytes as on this machine.
"""

from pathlib import Path
from typing import Any

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.row_features import FeatureTask, extract_features, has_features
from graftwork.data.ingest.blocks import LogBlock, ReadFault
from graftwork.data.settings import DataSettings
from graftwork.process.cluster.pieces import RemoteWork, pack

NOT_SENT = {"repair", "drift"}
"""Settings of other commands, which may name endpoints."""


def remote_features(context: AuditContext) -> RemoteWork[FeatureTask, int]:
    """The form for a cluster."""
    head = {
        "settings": context.settings.model_dump(mode="json", exclude=NOT_SENT),
        "base": context.base,
        "control_tokens": context.control_tokens,
        "base_reasons": context.base_reasons,
    }
    return RemoteWork(
        entry="graftwork.data.corpus.remote:extract_piece",
        shared=pack(head),
        encode=_encode,
        collect=_collect,
    )


def prepare_shared(head: Any, _blobs: list[bytes]) -> AuditContext:
    return AuditContext(
        settings=DataSettings.model_validate(head["settings"]),
        base=head["base"],
        control_tokens=tuple(head["control_tokens"]),
        base_reasons=head["base_reasons"],
    )


def extract_piece(context: AuditContext, head: Any, blobs: list[bytes]) -> None:
    """Work on one block, on a node."""
    out = Path(head["out"])
    block = LogBlock(
        file=head["file"],
        index=head["index"],
        key=head["key"],
        first_line=head["first_line"],
        data=blobs[0],
        offsets=None if head["offsets"] is None else tuple(head["offsets"]),
        faults=tuple(ReadFault.model_validate(fault) for fault in head["faults"]),
        transcript=head["transcript"],
    )
    if not has_features(out):
        extract_features(FeatureTask(block=block, out=out, context=context))


def _encode(task: FeatureTask) -> bytes:
    block = task.block
    head = {
        "file": block.file,
        "index": block.index,
        "key": block.key,
        "first_line": block.first_line,
        "offsets": block.offsets,
        "faults": [fault.model_dump(mode="json") for fault in block.faults],
        "transcript": block.transcript,
        "out": str(task.out.absolute()),
    }
    return pack(head, block.data)


def _collect(task: FeatureTask) -> int | None:
    return len(task.block.data) if has_features(task.out) else None
