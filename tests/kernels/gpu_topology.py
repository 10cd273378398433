"""GPUs to compile for where there are none: those that the CUDA plugin describes.

Needs the packages of requirements-gpu-aot.txt, in an environment of their own. Kernels of one
architecture a process.
"""

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from moelib.planning.hardware.gpu_targets import PLUGIN, target_configs

__all__ = ["A100", "B200", "H100", "PLUGIN", "mesh"]

H100 = "NVIDIA H100 80GB HBM3"
B200 = "NVIDIA B200"
A100 = "NVIDIA A100-SXM4-80GB"


def mesh(name: str, num_devices: int = 1) -> Mesh:
    """Returns a mesh, of one axis "x", of so many GPUs of a name."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_configs()[name], topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), ("x",))
