"""Several runs on one frozen base, each step of theirs in one batch: every row goes through its own adapter.

Input: jobs on the same base, and how a run is trained. Output: what each would leave alone, within the last
bits of its sums. Each run keeps its own order, schedule, optimizer, clipping and checkpoints: it is trained
by the same loop, in a thread of its own, of which only one works at any time. Where the loop asks for a loss,
it waits for the others; the last to come computes for all.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.adapters.lora import LoraLinear
from graftwork.records.dataset import Row
from graftwork.train.distributed.strategies import MicroBatch, SingleProcess
from graftwork.train.loss import TokenBatch, eager_logits, token_losses

ADAPTER_NAME = "default"

Work = Callable[[dict[int, Any]], dict[int, Any]]
"""Takes the input of each run, and returns the result for each."""


def share_weights(model: Any) -> Any:
    """The same model again, with modules of its own and the very same weights."""
    shared = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class GroupedLinear(nn.Module):
    """One product with the frozen weight for all rows, then each group's own adapter."""

    def __init__(self, layers: dict[int, LoraLinear], groups: dict[int, slice]) -> None:
        super().__init__()
        # Outside the module tree: the weights belong to the runs.
        object.__setattr__(self, "_layers", layers)
        object.__setattr__(self, "_groups", groups)
        first = next(iter(layers.values()))
        self.base_layer = first.base_layer
        self.in_features, self.out_features = first.in_features, first.out_features

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        layers: dict[int, LoraLinear] = self._layers  # type: ignore[assignment]
        groups: dict[int, slice] = self._groups  # type: ignore[assignment]
        parts = []
        for run, rows in groups.items():
            layer = layers.get(run)
            parts.append(y[rows] if layer is None else layer.change(x[rows], y[rows], ADAPTER_NAME))
        return torch.cat(parts)


class SharedSteps:
    """The runs that share their steps. `turn` is held by the active thread."""

    def __init__(self, base: Any, count: int) -> None:
        self.turn = threading.Condition()
        self._base = base
        self._models: dict[int, Any] = {}
        self._here = set(range(count))
        self._lead: Any = None
        self._groups: dict[int, slice] = {}
        """The rows of each run within the common batch."""
        self._losses: dict[int, Tensor] = {}
        self._brought: dict[Work, dict[int, Any]] = {self._forward: {}, self._backward: {}}
        """Input so far, by the function that processes it."""
        self._made: dict[Work, dict[int, Any]] = {self._forward: {}, self._backward: {}}
        self.passes = 0
        """Common batches so far."""

    def model_for(self, run: int) -> Any:
        self._models[run] = share_weights(self._base)
        self._lead = None
        return self._models[run]

    def leave(self, run: int) -> None:
        """The run has ended: the others no longer wait for it."""
        self._here.discard(run)
        for work, brought in self._brought.items():
            if brought and set(brought) >= self._here:
                self._hold(work)

    def losses(self, run: int, batch: TokenBatch) -> Tensor:
        """This run's summed loss, from a pass over the rows of all; a leaf whose gradient is its weight."""
        loss: Tensor = self._meet(self._forward, run, batch)
        return loss

    def go_back(self, run: int, weight: Tensor) -> None:
        """One backward pass for all, with a weight for each loss."""
        self._meet(self._backward, run, weight)

    def _meet(self, work: Work, run: int, brought: Any) -> Any:
        self._brought[work][run] = brought
        if set(self._brought[work]) >= self._here:
            self._hold(work)
        while run not in self._made[work]:
            self.turn.wait()
        share = self._made[work].pop(run)
        if isinstance(share, BaseException):
            raise share
        return share

    def _hold(self, work: Work) -> None:
        brought = dict(sorted(self._brought[work].items()))
        self._brought[work] = {}
        try:
            self._made[work].update(work(brought))
        except Exception as error:
            # What went wrong in the common pass went wrong for each of them.
            self._made[work].update(dict.fromkeys(brought, error))
        self.turn.notify_all()

    def _forward(self, brought: dict[int, Any]) -> dict[int, Any]:
        rows = [row for share in brought.values() for row in share.rows]
        ends = [0, *accumulate(len(share.rows) for share in brought.values())]
        self._groups.clear()
        self._groups.update(zip(brought, starmap(slice, pairwise(ends)), strict=True))
        model = self._lead_model()
        batch = TokenBatch(rows, device=str(next(model.parameters()).device), share_beginning=False)
        losses = token_losses(eager_logits(model, batch), batch.targets)
        parts = torch.split(losses, [share.trained for share in brought.values()])
        self._losses = {
            # Only supervised runs share their steps: every token weighs 1.
            run: part.sum()
            for run, part in zip(brought, parts, strict=True)
        }
        self.passes += 1
        return {run: loss.detach().requires_grad_() for run, loss in self._losses.items()}

    def _backward(self, brought: dict[int, Any]) -> dict[int, Any]:
        # A run that has left since the forward pass wants no gradient.
        runs = [run for run in brought if run in self._losses]
        torch.autograd.backward([self._losses[run] for run in runs], [brought[run] for run in runs])
        self._losses = {}
        return dict.fromkeys(brought)

    def _lead_model(self) -> Any:
        """A model whose adapted layers are those of all runs; rebuilt when a run joins."""
        if self._lead is None:
            self._lead = share_weights(self._base)
            by_path: dict[str, dict[int, LoraLinear]] = {}
            for run, model in self._models.items():
                for path, module in model.named_modules():
                    if isinstance(module, LoraLinear):
                        by_path.setdefault(path, {})[run] = module
            for path, layers in by_path.items():
                parent, _, leaf = path.rpartition(".")
                setattr(self._lead.get_submodule(parent), leaf, GroupedLinear(layers, self._groups))
        return self._lead


class SideBySide(SingleProcess):
    """A strategy of one process that shares its passes with other runs."""

    shares_steps = True

    def __init__(self, party: SharedSteps, run: int) -> None:
        self._party = party
        self._run = run

    def micro_batches(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        return (MicroBatch(rows),)

    def loss(self, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().loss(batch)
        self._leaf = self._party.losses(self._run, batch)
        return self._leaf

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        assert self._leaf.grad is not None
        self._party.go_back(self._run, self._leaf.grad)


def train_side_by_side(base: Any, works: Sequence[Callable[[Any, SideBySide], None]]) -> SharedSteps:
    """Run each function in its own thread, with a model on `base` and a strategy that knows the others."""
    party = SharedSteps(base, len(works))
    ended: list[BaseException] = []

    def take_part(run: int, work: Callable[[Any, SideBySide], None]) -> None:
        with party.turn:
            try:
                work(lambda _job: party.model_for(run), SideBySide(party, run))
            except BaseException as error:
                ended.append(error)
            finally:
                party.leave(run)

    threads = [threading.Thread(target=take_part, args=entry, daemon=True) for entry in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if ended:
        raise ended[0]
    return party
