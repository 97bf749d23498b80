import asyncio
import copy
import hashlib
import inspect
import itertools
import json
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

DataT = TypeVar("DataT")
TaskT = TypeVar("TaskT")
ConfigT = TypeVar("ConfigT")


def concrete_type(cls, base):
    """The first argument of the class's generic bases that is a `base`."""
    for kind in cls.__mro__:
        for generic in getattr(kind, "__orig_bases__", ()):
            for argument in get_args(generic):
                if isinstance(argument, type) and issubclass(argument, base):
                    return argument
    return None


class Message(BaseModel):
    role: str
    content: str | None = None


class TaskConfig(BaseModel):
    judges: list[Any] = []


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = ""
    task: TaskConfig = TaskConfig()


class TaskData(BaseModel):
    model_config = ConfigDict(frozen=True)

    idx: int | None = None
    id: str | None = None
    name: str | None = None
    prompt: str | list[Message] | None = None
    system_prompt: str | None = None
    image: str | None = None


class Runtime:
    pass


class AgentConfig(BaseModel):
    pass


class AgentInfo(BaseModel):
    config: AgentConfig
    name: str = "agent"


class MessageNode(BaseModel):
    parent: int | None = None
    message: Message
    sampled: bool = False


class TraceTask(BaseModel):
    type: str
    data: Any
    key: str
    hash: str


class ModelCall(BaseModel):
    node: int | None = None
    finish_reason: str | None = None


class Reward(BaseModel):
    score: float
    weight: float = 1.0


class State(BaseModel):
    pass


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = []
    calls: list[ModelCall] = []
    rewards: dict[str, Reward | None] = {}
    metrics: dict[str, float | None] = {}
    state: Any = None
    info: dict[str, Any] = {}
    is_completed: bool = False
    ok: bool = False
    stop_condition: str | None = None

    @property
    def last_reply(self):
        return next((node.message.content or "" for node in reversed(self.nodes) if node.sampled), "").strip()

    @property
    def is_truncated(self):
        return bool(self.calls) and self.calls[-1].finish_reason == "length"

    @property
    def reward(self):
        return sum(found.score * found.weight for found in self.rewards.values() if found is not None)


class TaskError(Exception):
    pass


def reward(weight=1.0):
    def mark(function):
        function.reward, function._vf_weight = True, weight
        return function

    return mark


def metric(function):
    function.metric = True
    return function


def invoke(function, available):
    wanted = inspect.signature(function).parameters
    return function(**{name: available[name] for name in wanted if name in available})


class Task(Generic[DataT]):
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(self, data, config=None):
        self.data, self.config = data, config or TaskConfig()

    @property
    def hash(self):
        content = json.dumps(self.data.model_dump(mode="json", exclude_none=True), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    key = hash

    async def setup(self, trace, runtime):
        return None

    async def finalize(self, trace, runtime):
        return None

    @classmethod
    def toolsets(cls, config):
        return []

    @classmethod
    def data_type(cls):
        return concrete_type(cls, TaskData) or TaskData

    def hooks(self, attr):
        named = {
            name for kind in type(self).__mro__ for name, value in vars(kind).items() if hasattr(value, attr)
        }
        return [getattr(self, name) for name in sorted(named)]

    async def score(self, trace, runtime=None):
        available = {"task": self.data, "trace": trace}
        try:
            for kind, kept in (("metric", trace.metrics), ("reward", trace.rewards)):
                hooks = self.hooks(kind)
                found = await asyncio.gather(*(invoke(hook, available) for hook in hooks))
                for hook, given in zip(hooks, found, strict=True):
                    values = given if isinstance(given, dict) else {hook.__name__: given}
                    for name, value in values.items():
                        weighted = Reward(score=float(value), weight=getattr(hook, "_vf_weight", 1.0))
                        kept[name] = weighted.score if kind == "metric" else weighted
        except Exception as error:
            raise TaskError(f"task {type(self).__name__} scoring: {type(error).__name__}: {error}") from error


class Taskset(Generic[TaskT, ConfigT]):
    def __init__(self, config):
        self.config = config

    @classmethod
    def task_type(cls):
        return concrete_type(cls, Task) or Task

    @classmethod
    def toolsets(cls, config):
        return []

    def take(self, count):
        for at, task in enumerate(itertools.islice(self.load(), count)):
            clone = copy.copy(task)
            clone.data = task.data.model_copy(update={"idx": at})
            yield clone
