"""A trainer config with experts, small enough to be traced in a test, and its workload."""

import functools

from experiments import flame_moe
from moelib.planning.estimate.workload import Workload, read_workload

_workloads = []  # (config, its workload)


@functools.cache
def config():
    """Returns the config: a dense layer and one with experts."""
    cfg = flame_moe.tiny().set(dir="unused")
    cfg.model.decoder.num_layers = 2
    return cfg


def dense():
    """Returns the config with two dense layers."""
    cfg = config().clone()
    cfg.model.decoder.block = [layer.clone() for layer in cfg.model.decoder.first_layers]
    return cfg


def workload_of(cfg) -> Workload:
    """Returns what a config's step computes; each config is traced once."""
    for known, work in _workloads:
        if known == cfg:
            return work
    _workloads.append((cfg.clone(), read_workload(cfg)))
    return _workloads[-1][1]


def workload() -> Workload:
    """Returns what the step of the config computes."""
    return workload_of(config())
