"""A trainer config with experts, small enough to be traced in a test, and its workload."""

import functools

from experiments import flame_moe
from moelib.planning.estimate.workload import Workload, read_workload


@functools.cache
def config():
    """Returns the config: a dense layer and one with experts."""
    cfg = flame_moe.tiny().set(dir="unused")
    cfg.model.decoder.num_layers = 2
    return cfg


@functools.cache
def workload() -> Workload:
    """Returns what its step computes."""
    return read_workload(config())
