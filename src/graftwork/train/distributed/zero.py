"""DeepSpeed ZeRO 2 and 3: gradients and optimizer in parts, with 3 the weights too.

Through accelerate's plugin; DeepSpeed's own engine does backward, clipping and step. It shortens the
gradient within its step; the length is asked before, so that a bad gradient can still be refused.
Checkpoints hold whole tensors under the same names as those of one process.
"""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graftwork.model.parts import decoder_parts
from graftwork.train.distributed.strategies import BatchLoss, DataParallel, OptimizerState

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
        # The optimizer is torch's own, also in host memory: the same sums as in one process.
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
            # accelerate turns to DeepSpeed only where it sees an accelerator; DeepSpeed knows processors.
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
        held = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        return {**held, "step": steps[0].detach().clone()}

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
        """The optimizer makes its states in its first step; to be given some, it must have them before."""
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
        """The optimizer's counts, one for each part that it keeps together."""
        return [state["step"] for state in self._zero.optimizer.state.values() if "step" in state]


def _load_as_ever() -> None:
    """transformers loads models sharded once it detects ZeRO-3; ours are verified whole, then sharded."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
