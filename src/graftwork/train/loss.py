"""The loss, written once: weighted cross entropy over the trained tokens, by autograd and written out.

Input: rows and, from the objective, a weight for each trained token. Output: the weighted loss, summed. The
head runs only where a reply token is predicted, so full logits are never built; the prefix that all rows of a
batch share (the system prompt) is read once for the batch. Neither changes the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.parts import logits_reader
from graftwork.records.dataset import Row
from graftwork.train.objectives.epochs import shared_tokens


class TokenBatch:
    """Rows padded on the right, without their common prefix, and the positions that predict reply tokens."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        device: str,
        share_beginning: bool = True,
        weighed: bool = False,
        weights: Sequence[Tensor] | None = None,
    ) -> None:
        self.rows = rows
        self.weighed = weighed
        """Whether the objective weighs the tokens; in evaluations every token weighs 1."""
        shared = shared_tokens(rows) if share_beginning else 0
        width = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        attended = torch.zeros(len(rows), width, dtype=torch.long)
        predicts = torch.zeros(len(rows), width, dtype=torch.bool)
        for index, row in enumerate(rows):
            length = len(row.tokens)
            tokens[index, :length] = torch.tensor(row.tokens)
            attended[index, :length] = 1
            # The token before a trained one predicts it.
            predicts[index, row.trained_from - 1 : length - 1] = True
        self.shared = tokens[:1, :shared].to(device)
        self.tokens = tokens[:, shared:].to(device)
        self.attended = attended.to(device)
        self.predicts = predicts[:, shared:].to(device)
        self.targets = tokens.roll(-1, dims=1)[predicts].to(device)
        self.weights = None if weights is None else torch.cat(list(weights)).to(device)
        """The weights, if an engine needs them before its forward pass."""
        self.trained = int(self.targets.numel())

    def by_row(self, values: Tensor) -> list[Tensor]:
        """Values of all trained tokens, split by row."""
        return list(torch.split(values, [len(row.tokens) - row.trained_from for row in self.rows]))


Logits = Callable[[TokenBatch], Tensor]
"""Computes the logits of a batch's trained tokens, in the order of `TokenBatch.targets`."""


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target."""
    return nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of weight · -log p over the targets; without weights every target weighs 1."""
    if weights is None:
        return nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
    return (token_losses(logits, targets) * weights).sum()


def loss_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weighted loss and its gradient with respect to the logits, written out; negative targets are
    ignored.
    """
    counted = targets >= 0
    weight = counted if weights is None else weights * counted
    target_column = targets.clamp(min=0)[:, None]
    level = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = (level - logits.gather(1, target_column))[:, 0]
    columns = torch.arange(logits.shape[1], device=logits.device)[None]
    d = (torch.exp(logits - level) - (columns == target_column).float()) * weight[:, None]
    return (losses * weight).sum(), d


def summed_loss(model: Any, batch: TokenBatch) -> Tensor:
    return weighted_loss(eager_logits(model, batch), batch.targets, None)


def eager_logits(model: Any, batch: TokenBatch) -> Tensor:
    """The logits of the trained tokens by the model's own forward pass."""
    reader = logits_reader(model)
    hidden = _hidden_states(reader.decoder, batch)
    return reader.logits(hidden[batch.predicts])


def _hidden_states(decoder: Any, batch: TokenBatch) -> Tensor:
    """The last hidden state of every token after the common prefix."""
    shared = batch.shared.shape[1]
    if not shared:
        whole: Tensor = decoder(
            input_ids=batch.tokens, attention_mask=batch.attended, use_cache=False
        ).last_hidden_state
        return whole
    from transformers import DynamicCache

    # The prefix's keys and values carry gradients back from every row that attends to them.
    cache = DynamicCache(config=decoder.config)
    decoder(input_ids=batch.shared, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(batch.tokens.shape[0])
    positions = torch.arange(shared, shared + batch.tokens.shape[1], device=batch.tokens.device)[None]
    hidden: Tensor = decoder(
        input_ids=batch.tokens,
        attention_mask=batch.attended,
        position_ids=positions.expand(batch.tokens.shape[0], -1),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return hidden


@torch.inference_mode()
def mean_loss(model: Any, rows: Sequence[Row], *, batch_size: int, device: str) -> float | None:
    """The mean cross entropy per trained token over `rows`; None without rows."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    total, tokens = 0.0, 0
    for start in range(0, len(ordered), batch_size):
        batch = TokenBatch(ordered[start : start + batch_size], device=device)
        total += float(summed_loss(model, batch))
        tokens += batch.trained
    return total / tokens
