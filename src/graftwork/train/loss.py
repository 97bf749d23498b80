"""The loss on reply tokens only.

In: a decoder and rows. Out: the summed loss and how many tokens it covers. Two things are not
computed because nobody needs them: the head where no reply token is predicted, so that the full
logits are never built; and the beginning that all rows of a batch share (the system prompt), which
is read once a batch and not once a row. Both leave the gradient what it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.parts import logits_reader
from graftwork.records.dataset import Row
from graftwork.train.objectives.epochs import shared_tokens


class TokenBatch:
    """Rows padded on the right, without their common beginning, and where reply tokens are predicted."""

    def __init__(self, rows: Sequence[Row], *, device: str, share_beginning: bool = True) -> None:
        self.rows = rows
        shared = shared_tokens(rows) if share_beginning else 0
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
        self.shared = tokens[:1, :shared].to(device)
        self.tokens = tokens[:, shared:].to(device)
        self.attended = attended.to(device)
        self.predicts = predicts[:, shared:].to(device)
        self.targets = tokens.roll(-1, dims=1)[predicts].to(device)
        self.count = sum(len(row.tokens) for row in rows)
        self.trained = int(self.targets.numel())


def summed_loss(model: Any, batch: TokenBatch) -> Tensor:
    """Cross entropy over the trained tokens, summed."""
    reader = logits_reader(model)
    hidden = _hidden_states(reader.decoder, batch)
    logits = reader.logits(hidden[batch.predicts])
    return nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")


def _hidden_states(decoder: Any, batch: TokenBatch) -> Tensor:
    """The last hidden state of every token behind the common beginning."""
    shared = batch.shared.shape[1]
    if not shared:
        whole: Tensor = decoder(
            input_ids=batch.tokens, attention_mask=batch.attended, use_cache=False
        ).last_hidden_state
        return whole
    from transformers import DynamicCache

    # Keys and values of the beginning carry their gradient into every row that looks at them.
    cache = DynamicCache(config=decoder.config)
    decoder(input_ids=batch.shared, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(batch.tokens.shape[0])
    positions = torch.arange(shared, shared + batch.tokens.shape[1], device=batch.tokens.device)[None]
    rest: Tensor = decoder(
        input_ids=batch.tokens,
        attention_mask=batch.attended,
        position_ids=positions.expand(batch.tokens.shape[0], -1),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return rest


@torch.inference_mode()
def mean_loss(model: Any, rows: Sequence[Row], *, batch_rows: int, device: str) -> float | None:
    """The loss a trained token over `rows`, or None where there are none."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    total, tokens = 0.0, 0
    for at in range(0, len(ordered), batch_rows):
        batch = TokenBatch(ordered[at : at + batch_rows], device=device)
        total += float(summed_loss(model, batch))
        tokens += batch.trained
    return total / tokens
