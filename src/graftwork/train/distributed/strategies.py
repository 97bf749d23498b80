"""How processes share a run: one alone, each with the whole model (DDP), or a part of it (FSDP, ZeRO).

Input: rows of a step, a loss, an optimizer. Output: the portions of each process, and gradients and updates
that are those of all of them. Every process gets as many portions as every other, because those that hold
only a part of the model must call it equally often. Checkpoints hold whole tensors under the names of one
process.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from graftwork.model.parts import decoder_parts
from graftwork.records.dataset import Row


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward and backward pass.

    A process with nothing to do works on a row that does not count.
    """

    rows: Sequence[Row]
    counts: bool = True
    last: bool = True
    """No other micro-batch follows: the gradients can be summed over all processes."""


def split_into_micro_batches(
    rows: Sequence[Row], *, size: int, micro_rows: int | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of each process, by rank. Every row counts in exactly one."""
    hands = balance_rows([len(row.tokens) for row in rows], size=size)
    most = max(len(hand) for hand in hands)
    rounds = -(-most // max(micro_rows or most, 1))
    spare = min(rows, key=lambda row: len(row.tokens))
    portions: list[list[MicroBatch]] = []
    for hand in hands:
        # As many as there are rounds, none larger than needed.
        bounds = [len(hand) * number // rounds for number in range(rounds + 1)]
        parts = [[rows[index] for index in hand[start:end]] for start, end in pairwise(bounds)]
        portions.append([MicroBatch(part or (spare,), counts=bool(part), last=False) for part in parts])
        portions[-1][-1] = replace(portions[-1][-1], last=True)
    return portions


def balance_rows(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Row numbers for each of `size`, in their order, so that the tokens are about even: long rows first,
    each to the process with the fewest tokens."""
    hands: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = min(range(size), key=lambda rank: (tokens[rank], rank))
        hands[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(hand) for hand in hands]


BatchLoss = Callable[[Any], Tensor]
OptimizerState = dict[str, Tensor]
"""What the optimizer holds of one parameter, by its own names."""


class SingleProcess:
    """Trains alone. Subclasses share the work of a step, or hold weights and optimizer differently."""

    rank = 0
    size = 1
    shards = False
    """No process holds the whole model: it can be called only together, and on the plain path."""
    shares_steps = False
    """Whether several runs have their steps in common batches."""
    device: str | None = None
    """Where this process works; None: where the model is."""

    def prepare(
        self, model: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer, loss: BatchLoss
    ) -> list[nn.Parameter]:
        """Take over the model; returns the parameters in their new form, in the same order."""
        del model
        self._parameters, self._optimizer, self._loss = list(parameters), optimizer, loss
        return self._parameters

    def micro_batches(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        """The micro-batches of a step for this process, one forward and backward pass each."""
        return split_into_micro_batches(rows, size=1, micro_rows=micro_rows)[0]

    def loss(self, batch: Any) -> Tensor:
        """The function given to `prepare`, on the model as this strategy holds it."""
        return self._loss(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of this micro-batch; after the last one it is that of all processes."""
        del last
        loss.backward()  # type: ignore[no-untyped-call]

    def sum(self, value: float) -> float:
        """The sum over all processes of a number that each of them has."""
        return value

    def clip_gradients(self, most: float) -> float:
        """Return the norm of the whole gradient; it is clipped to `most`."""
        return float(nn.utils.clip_grad_norm_(self._parameters, most))

    def step(self, rate: float) -> None:
        """Apply the gradient, and clear it."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if not self.shards:
            # A fused update does not count as a change: what was kept for the old weights (the lengths of
            # DoRA) would be read again.
            torch.autograd.graph.increment_version(self._parameters)
        self.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather a whole parameter, or a tensor of its shape, from its shards."""
        return tensor

    @torch.no_grad()
    def assign(self, parameter: Tensor, whole: Tensor) -> None:
        parameter.copy_(whole)

    def optimizer_state(self, parameter: nn.Parameter) -> OptimizerState:
        """The optimizer's state of a parameter, whole; empty before the first step."""
        return dict(self._optimizer.state.get(parameter, {}))

    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        # A fused update wants the count of its steps where the weights are.
        self._optimizer.state[parameter] = {key: held[key].to(parameter.device) for key in held}

    def any_process(self, flag: bool) -> bool:
        """Whether any process reports true."""
        return flag

    def broadcast(self, value: Any) -> Any:
        """Broadcast a value of the first process (anything that JSON can hold)."""
        return value

    def finish(self) -> None:
        """The work is done: wait for the others and release them."""


SYNC_TIMEOUT = timedelta(hours=1)
"""A process may write a large checkpoint or evaluate the model while the others wait."""


class LossModule(nn.Module):
    """A model whose forward is its loss, so that a wrapper sees all of a step."""

    def __init__(self, model: Any, loss: BatchLoss) -> None:
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
        by_gloo: dict[str, Any] = {}
        if not on_cpu:
            gpus = torch.cuda.device_count()
            if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus:
                # NCCL refuses two processes on one GPU; DeepSpeed takes the local rank for a GPU's number.
                by_gloo = {"backend": "gloo"}
                os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.accelerator = Accelerator(
            cpu=on_cpu,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=SYNC_TIMEOUT, **by_gloo),
                # All buffers are constants, and weights in four bits are buffers: gigabytes in every pass.
                DistributedDataParallelKwargs(find_unused_parameters=False, broadcast_buffers=False),
            ],
            **self.plugins(),
        )
        self.device = str(self.accelerator.device)
        on_host = distributed.get_backend() == "gloo"
        self._words = None if on_host else distributed.new_group(backend="gloo", timeout=SYNC_TIMEOUT)

    def plugins(self) -> dict[str, Any]:
        return {}

    def prepare(
        self, model: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer, loss: BatchLoss
    ) -> list[nn.Parameter]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for parameter in parameters]
        self._model = model
        self._run, self._optimizer = self.accelerator.prepare(LossModule(model, loss), optimizer)
        now = dict(model.named_parameters())
        self._parameters = [now[name] for name in order]
        return self._parameters

    def micro_batches(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        return split_into_micro_batches(rows, size=self.size, micro_rows=micro_rows)[self.rank]

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self._run(batch)
        return loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # Engines of several devices take the mean over processes; ours is a sum.
        waiting = nullcontext() if last else self.accelerator.no_sync(self._run)
        with waiting:
            self.accelerator.backward(loss * self.size)

    def sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total, group=self._words)
        return float(total)

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state.get(parameter, {})
        return {key: self.gather(tensor) for key, tensor in state.items()}

    def any_process(self, flag: bool) -> bool:
        return self.sum(float(flag)) > 0

    def broadcast(self, value: Any) -> Any:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = round(self.sum(float(len(text))))
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        distributed.broadcast(letters, src=0, group=self._words)
        return json.loads(bytes(letters.tolist()))

    def finish(self) -> None:
        self.broadcast(None)
        distributed.destroy_process_group()


class FullyShardedDataParallel(DataParallel):
    shards = True

    def __init__(self, *, on_cpu: bool, offload: bool) -> None:
        self._on_cpu = on_cpu
        self._offload = offload and not on_cpu
        super().__init__(on_cpu=on_cpu)

    def plugins(self) -> dict[str, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        if self._offload:
            # Gradients are on the host, and so is the sum of their norms: accelerate then adds gloo.
            os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
        self._plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload=self._offload,
            # Every process reads the base itself: its hash is proven before it is cut up.
            cpu_ram_efficient_loading=False,
        )
        return {"fsdp_plugin": self._plugin}

    def prepare(
        self, model: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer, loss: BatchLoss
    ) -> list[nn.Parameter]:
        blocks = decoder_parts(model).blocks
        self._plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})
        if self._on_cpu:
            # accelerate turns to FSDP only where it sees an accelerator; torch's own works on both.
            from accelerate.utils import DistributedType

            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = self._plugin
        return super().prepare(model, parameters, optimizer, loss)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # Added up at every portion: whole gradients would need the memory that the parts save.
        del last
        self.accelerator.backward(loss * self.size)

    def clip_gradients(self, most: float) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self._parameters, most)
        return float(self.gather(norm))

    def gather(self, tensor: Tensor) -> Tensor:
        gather = getattr(tensor, "full_tensor", None)
        whole: Tensor = tensor if gather is None else gather()
        return whole

    @torch.no_grad()
    def assign(self, parameter: Tensor, whole: Tensor) -> None:
        _local(parameter).copy_(_part_of(whole, like=parameter))

    @torch.no_grad()
    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        state = {}
        for key, tensor in held.items():
            # Made like the parameter: offloaded shards are on the host, whatever the device of their mesh.
            state[key] = tensor.cpu() if key == "step" else torch.zeros_like(parameter)
            if key != "step":
                _local(state[key]).copy_(_part_of(tensor, like=parameter))
        self._optimizer.state[parameter] = state


def _local(tensor: Any) -> Tensor:
    """This process's shard of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local


def _part_of(whole: Tensor, *, like: Any) -> Tensor:
    """This process's part of a tensor that all of them have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return whole
    return _local(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))


MOMENTS = ("exp_avg", "exp_avg_sq")


def zero_config(stage: int, *, offload: bool, most: float) -> dict[str, Any]:
    """DeepSpeed's configuration for one of our steps. Pure."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Small weights are cut up too: whole ones would have to be kept apart from the others.
        zero["stage3_param_persistence_threshold"] = 0
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": most,
        # The optimizer is torch's own, even in host memory: the same sums as in one process.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


class ZeroStrategy(DataParallel):
    def __init__(self, *, stage: int, on_cpu: bool, offload: bool, most: float) -> None:
        self._stage = stage
        self.shards = stage == 3
        self._on_cpu = on_cpu
        self._config = zero_config(stage, offload=offload and not on_cpu, most=most)
        if on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        super().__init__(on_cpu=on_cpu)
        _load_as_ever()

    def plugins(self) -> dict[str, Any]:
        from accelerate.utils import DeepSpeedPlugin

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._plugin = DeepSpeedPlugin(hf_ds_config=self._config)
        return {"deepspeed_plugin": self._plugin}

    def prepare(
        self, model: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer, loss: BatchLoss
    ) -> list[nn.Parameter]:
        if self._on_cpu:
            # accelerate turns to DeepSpeed only where it sees an accelerator; DeepSpeed knows CPUs.
            import deepspeed
            from accelerate.utils import DistributedType

            # An operator for a kind of sum that training never takes would be compiled for minutes.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            state = self.accelerator.state
            self._plugin.select(_from_accelerator_state=True)
            state.deepspeed_plugins = self._plugin
            state.distributed_type = DistributedType.DEEPSPEED
        if self._stage == 3:
            # A block is gathered whole, as with FSDP: its parts read each other's weights.
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(
                model, sorted({type(block) for block in decoder_parts(model).blocks}, key=str)
            )
            # A block whose input asks for no gradient would be dropped before it has gone back.
            model.get_input_embeddings().register_forward_hook(lambda _module, _in, out: out.requires_grad_())
        parameters = super().prepare(model, parameters, optimizer, loss)
        _load_as_ever()
        self._engine = self._run
        self._zero = self._engine.optimizer
        return list(parameters)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss * self.size)

    def clip_gradients(self, most: float) -> float:
        if self._stage == 2:
            return float(self._zero.scaled_global_norm())
        from deepspeed.utils import safe_get_local_grad

        grads = [safe_get_local_grad(parameter) for parameter in self._parameters]
        return math.sqrt(self.sum(sum(float(grad.double().square().sum()) for grad in grads)))

    def step(self, rate: float) -> None:
        for group in self._zero.param_groups:
            group["lr"] = rate
        self._engine.step()

    def zero_grad(self) -> None:
        """What DeepSpeed does itself with a gradient that has overflowed."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self._config["zero_optimization"].get("offload_optimizer"):
            zero.reset_cpu_buffers()
        elif self._stage == 3:
            zero.averaged_gradients = {}
        else:
            for group in zero.averaged_gradients:
                zero.averaged_gradients[group] = None
                zero.all_grad_tensors[group] = None
        if self._stage == 2:
            zero.micro_step_id = -1

    def gather(self, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "ds_id"):
            return tensor
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()

    @torch.no_grad()
    def assign(self, parameter: Tensor, whole: Tensor) -> None:
        """Both copies: the one that the model reads, and the one that the optimizer steps from."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage == 2:
            parameter.copy_(whole)
            safe_set_full_fp32_param(parameter, whole.to(self.device))
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole)
        safe_set_local_fp32_param(parameter, self._part_of(whole, parameter))

    def optimizer_state(self, parameter: nn.Parameter) -> OptimizerState:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = self._steps()
        if not steps or not float(steps[0]):
            return {}
        moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        return {**moments, "step": steps[0].detach().clone()}

    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        self._begin_states()
        for key in MOMENTS:
            if self._stage == 2:
                safe_set_full_optimizer_state(parameter, held[key].to(self.device), key)
            else:
                safe_set_local_optimizer_state(parameter, self._part_of(held[key], parameter), key)
        for step in self._steps():
            step.fill_(float(held["step"]))

    def _begin_states(self) -> None:
        """The optimizer creates its states in its first step; to restore some, they must exist before."""
        zero, optimizer = self._zero, self._zero.optimizer
        flat = zero.single_partition_of_fp32_groups if self._stage == 2 else zero.fp32_partitioned_groups_flat
        for part in flat:
            if not optimizer.state.get(part):
                fused = optimizer.defaults.get("fused")
                step = torch.zeros((), dtype=torch.float32, device=part.device if fused else "cpu")
                moments = {key: torch.zeros_like(part) for key in MOMENTS}
                optimizer.state[part] = {"step": step, **moments}
        if self._stage == 2:
            zero._lazy_init_hp_params_optimizer_state()

    def _part_of(self, whole: Tensor, parameter: Any) -> Tensor:
        """This process's part of a tensor as ZeRO-3 cuts it: flat, the last one filled up with zeros."""
        size = int(parameter.ds_tensor.ds_numel)
        mine = whole.flatten()[self.rank * size : (self.rank + 1) * size].float()
        return nn.functional.pad(mine, (0, size - mine.numel())).to(self.device)

    def _steps(self) -> list[Tensor]:
        """The optimizer's step counts, one for each of its parts."""
        return [state["step"] for state in self._zero.optimizer.state.values() if "step" in state]


def _load_as_ever() -> None:
    """transformers loads models sharded once it detects ZeRO-3; ours are verified whole, then sharded."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
