"""The loss on reply tokens only.

In: a decoder and rows. Out: the summed loss and how many tokens it covers. The head is applied to
the positions that are trained and to no others: the full logits are never built.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.records.dataset import Row


class Batch:
    """Rows padded on the right, and where their trained tokens are predicted from."""

    def __init__(self, rows: Sequence[Row], *, device: str) -> None:
        width = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        attended = torch.zeros(len(rows), width, dtype=torch.long)
        predicts = torch.zeros(len(rows), width, dtype=torch.bool)
        for place, row in enumerate(rows):
            length = len(row.tokens)
            tokens[place, :length] = torch.tensor(row.tokens)
            attended[place, :length] = 1
            # The token before a trained one predicts it.
            predicts[place, row.trained_from - 1 : length - 1] = True
        self.tokens = tokens.to(device)
        self.attended = attended.to(device)
        self.predicts = predicts.to(device)
        self.targets = tokens.roll(-1, dims=1).to(device)[self.predicts]
        self.count = sum(len(row.tokens) for row in rows)
        self.trained = int(self.targets.numel())


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """Cross entropy over the trained tokens, summed."""
    hidden = model.model(input_ids=batch.tokens, attention_mask=batch.attended, use_cache=False)
    logits = model.lm_head(hidden.last_hidden_state[batch.predicts])
    return nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")


@torch.inference_mode()
def mean_loss(model: Any, rows: Sequence[Row], *, batch_rows: int, device: str) -> float | None:
    """The loss a trained token over `rows`, or None where there are none."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    total, tokens = 0.0, 0
    for at in range(0, len(ordered), batch_rows):
        batch = Batch(ordered[at : at + batch_rows], device=device)
        total += float(summed_loss(model, batch))
        tokens += batch.trained
    return total / tokens
