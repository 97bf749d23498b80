"""A base that stays in memory from one run to the next, as it was when it was loaded.

In: jobs, one after the other. Out: for each its base; loaded anew only where it is another one, or
where the last run left it otherwise than it found it. Chance stands as after the loading in a process
of its own. Does not know what a run does with it.
"""

from collections.abc import Callable
from typing import Any

from graftwork.records.run import TrainJob

CACHEABLE_METHODS = ("lora", "dora")
"""Methods that leave every weight of the base where and what it is. The others get a base of their own."""


class BaseCache:
    def __init__(self, load: Callable[[TrainJob], Any]) -> None:
        self._load = load
        self._key: tuple[str, ...] | None = None
        self._model: Any = None
        self._modules: dict[str, Any] = {}
        self._weights: dict[str, tuple[int, int, str]] = {}
        self._fresh: Any = None
        self._loaded: Any = None
        self.loads = 0

    def take(self, job: TrainJob) -> Any:
        """The base of this job, without anything that an earlier run attached to it."""
        from graftwork.train.chance import random_states, restore_random_states

        self._fresh = self._fresh or random_states()
        tuning = job.plan.tuning
        form: tuple[str, ...] = ("plain",)
        if tuning is not None:
            form = (tuning.form, tuning.head, str(tuning.turned), str(tuning.host_embedding))
        key = (job.base_folder, job.plan.dtype, job.plan.device.kind, job.plan.method, *form)
        if self._model is not None and key == self._key and self._put_back():
            restore_random_states(self._loaded)
            return self._model
        self.drop()
        restore_random_states(self._fresh)
        model = self._load(job)
        self.loads += 1
        if job.plan.method in CACHEABLE_METHODS:
            self._key, self._model, self._loaded = key, model, random_states()
            self._modules = dict(model.named_modules())
            self._weights = _weight_identities(model)
        return model

    def drop(self) -> None:
        """Let it go: before another is loaded, or after a run that ended badly."""
        self._key, self._model, self._modules, self._weights = None, None, {}, {}

    def _put_back(self) -> bool:
        """Every module in its place and nothing hung upon it; False where that cannot be had."""
        for path, module in self._modules.items():
            if path:
                parent, _, leaf = path.rpartition(".")
                setattr(self._modules[parent], leaf, module)
            # What was set on the module itself would hide the method of its class.
            module.__dict__.pop("forward", None)
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                hooks.clear()
        self._model.requires_grad_(False)
        self._model.eval()
        return (
            dict(self._model.named_modules()) == self._modules
            and _weight_identities(self._model) == self._weights
        )


def _weight_identities(model: Any) -> dict[str, tuple[int, int, str]]:
    """Which tensors the model is made of: the bytes in them are proven by each run itself."""
    return {
        name: (id(weight), weight.data_ptr(), str(weight.dtype)) for name, weight in model.named_parameters()
    }
