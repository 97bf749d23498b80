from verifiers.v1.core import (
    AgentConfig,
    AgentInfo,
    MessageNode,
    Runtime,
    Task,
    TaskConfig,
    TaskData,
    Taskset,
    TasksetConfig,
    Trace,
    metric,
    reward,
)

__all__ = [
    "AgentConfig",
    "AgentInfo",
    "MessageNode",
    "Runtime",
    "Task",
    "TaskConfig",
    "TaskData",
    "Taskset",
    "TasksetConfig",
    "Trace",
    "metric",
    "reward",
]
