"""Channels of collectives: one for each on simulated devices, where they tell collectives apart."""

import itertools
from typing import Any

import jax
from jax.extend.mlir import ir

_CHANNEL = "channel_handle"


def own_channels(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Returns a lowered program; for several CPUs, each of its collectives has its own channel.

    JAX gives all collectives of `jax.shard_map` channel 1. XLA:CPU starts collectives in order, but
    may run those inside a loop concurrently with one after the loop. Two of them with the same
    channel and devices join one rendezvous, for example gathers of experts in the loop of layers
    and the gather of the output layer, and the process aborts or has a segmentation fault.

    Args:
        lowered: Lowered program, modified in place.
        mesh: Mesh that the program runs on.
    """
    devices = mesh.devices
    if devices.size == 1 or devices.flat[0].platform != "cpu":
        return lowered
    module: Any = lowered.compiler_ir()
    numbers = itertools.count(1)

    def renumber(op: ir.Operation) -> ir.WalkResult:
        if _CHANNEL in op.attributes:
            text = f"#stablehlo.channel_handle<handle = {next(numbers)}, type = 1>"
            op.attributes[_CHANNEL] = ir.Attribute.parse(text, module.context)
        return ir.WalkResult.ADVANCE

    module.operation.walk(renumber)
    return lowered
