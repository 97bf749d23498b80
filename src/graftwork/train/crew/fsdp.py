"""FSDP2: every process holds a part of each weight, frozen ones too, and borrows a block when it works.

A block of the decoder is gathered before it is used and dropped after; with offload the parts wait in
host memory. Checkpoints hold whole tensors, so any other crew can go on from them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts
from graftwork.train.crew.crew import OptimizerState
from graftwork.train.crew.together import DataParallel


class FullyShardedDataParallel(DataParallel):
    shards = True

    def __init__(self, *, on_cpu: bool, offload: bool) -> None:
        self._on_cpu = on_cpu
        self._offload = offload and not on_cpu
        super().__init__(on_cpu=on_cpu)

    def plugins(self) -> dict[str, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        self._plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload=self._offload,
            # Every process reads the base itself: its hash is proven before it is cut up.
            cpu_ram_efficient_loading=False,
        )
        return {"fsdp_plugin": self._plugin}

    def join(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        blocks = decoder_parts(model).blocks
        self._plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})
        if self._on_cpu:
            self._also_on_processors()
        return super().join(model, parameters, optimizer, loss)

    def _also_on_processors(self) -> None:
        """accelerate turns to FSDP only where it sees an accelerator; torch's own works on both."""
        from accelerate.utils import DistributedType

        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = self._plugin

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # Added up at every portion: whole gradients would need the memory that the parts save.
        del last
        self.accelerator.backward(loss * self.size)

    def shorten(self, most: float) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self._parameters, most)
        return float(self.whole(norm))

    def whole(self, tensor: Tensor) -> Tensor:
        gather = getattr(tensor, "full_tensor", None)
        whole: Tensor = tensor if gather is None else gather()
        return whole

    @torch.no_grad()
    def put(self, parameter: Tensor, whole: Tensor) -> None:
        parameter.copy_(_part_of(whole, like=parameter))

    def hold(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        self._optimizer.state[parameter] = {
            key: tensor.cpu() if key == "step" else _part_of(tensor, like=parameter)
            for key, tensor in held.items()
        }


def _part_of(whole: Tensor, *, like: Any) -> Tensor:
    """This process's part of a tensor that all of them have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return whole.to(like.device)
    device = like.to_local().device
    return distribute_tensor(whole.to(device), like.device_mesh, like.placements, src_data_rank=None)
