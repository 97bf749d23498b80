import importlib

from verifiers.v1.core import Taskset, TasksetConfig, concrete_type
from verifiers.v1.envs.single_agent import SingleAgentEnv


def taskset_class(name):
    module = importlib.import_module(name.replace("-", "_"))
    return next(
        value
        for value in map(vars(module).get, module.__all__)
        if isinstance(value, type) and issubclass(value, Taskset)
    )


def taskset_config_type(name):
    return concrete_type(taskset_class(name), TasksetConfig) or TasksetConfig


def environment_class(_name):
    return SingleAgentEnv
