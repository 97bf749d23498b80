"""Several processes with the whole model each (DDP), and what all other crews have in common with them.

Started by torchrun, which names rank and size in the environment. Tensors go by gloo on processors and
by NCCL on GPUs; words (who stops, who saves) always by gloo, as JSON and never pickled.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graftwork.records.dataset import Row
from graftwork.train.crew.alone import SingleProcess
from graftwork.train.crew.deal import MicroBatch, split_into_micro_batches

SYNC_TIMEOUT = timedelta(hours=1)
"""A process may write a large checkpoint or look at the model while the others wait."""


class LossModule(nn.Module):
    """A model whose forward is its loss, so that whoever wraps it sees all of a step."""

    def __init__(self, model: Any, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.of = loss

    def forward(self, batch: Any) -> Tensor:
        return self.of(batch)


class DataParallel(SingleProcess):
    """DDP through accelerate. Its subclasses change how the model is held."""

    def __init__(self, *, on_cpu: bool) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        if not on_cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.accelerator = Accelerator(
            cpu=on_cpu,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=SYNC_TIMEOUT),
                DistributedDataParallelKwargs(find_unused_parameters=False),
            ],
            **self.plugins(),
        )
        self.device = str(self.accelerator.device)
        by_gloo = distributed.get_backend() == "gloo"
        self._words = None if by_gloo else distributed.new_group(backend="gloo", timeout=SYNC_TIMEOUT)

    def plugins(self) -> dict[str, Any]:
        return {}

    def join(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for parameter in parameters]
        self._model = model
        self._run, self._optimizer = self.accelerator.prepare(LossModule(model, loss), optimizer)
        now = dict(model.named_parameters())
        self._parameters = [now[name] for name in order]
        return self._parameters

    def share(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        return split_into_micro_batches(rows, size=self.size, micro_rows=micro_rows)[self.rank]

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self._run(batch)
        return loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # Engines of several devices take the mean over processes; ours is a sum.
        waiting = nullcontext() if last else self.accelerator.no_sync(self._run)
        with waiting:
            self.accelerator.backward(loss * self.size)

    def sum_up(self, value: float, parameters: Sequence[nn.Parameter] = ()) -> float:
        del parameters
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total, group=self._words)
        return float(total)

    def held(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        held = self._optimizer.state.get(parameter, {})
        return {key: self.whole(tensor) for key, tensor in held.items()}

    def any(self, said: bool) -> bool:
        return self.sum_up(float(said)) > 0

    def tell(self, value: Any) -> Any:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = round(self.sum_up(float(len(text))))
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        distributed.broadcast(letters, src=0, group=self._words)
        return json.loads(bytes(letters.tolist()))

    def part(self) -> None:
        self.tell(None)
        distributed.destroy_process_group()
