"""Compiles ring attention for four TPUs, ahead of time, and prints the order of its loops.

Run by `tests.kernels.tpu_topology.compile_apart`. A line of JSON is the list of permutes and
kernels of a loop, as scheduled.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.kernels.flash_attention import MaskSpec
from moelib.layers.attention.on_mesh import attend
from moelib.parallel.mesh import MESH_AXIS_NAMES

_EVENT = re.compile(r"collective-permute-(?:start|done)(?=\()|tpu_custom_call")


def main():
    """Prints the loops of the forward pass that have permutes."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2x1").devices
    shape = [4 if axis == "seq" else 1 for axis in MESH_AXIS_NAMES]
    mesh = Mesh(np.array(devices).reshape(shape), MESH_AXIS_NAMES)
    split = NamedSharding(mesh, PartitionSpec(None, "seq"))
    x = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16, sharding=split)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda q, k, v: attend(q, k, v, spec=MaskSpec(0.1)))
        text = str(run.lower(x, x, x).compile().as_text())
    computations = re.split(r"\n(?=%|ENTRY)", text)
    for body in computations[1:]:
        if "/while/" in body and "collective-permute-start" in body and "ENTRY" not in body[:5]:
            print(json.dumps(_EVENT.findall(body)))


if __name__ == "__main__":
    main()
