"""GPUs to compile for where there are none: those that the CUDA plugin describes.

Needs the packages of requirements-gpu-aot.txt, in an environment of their own. Kernels of one
architecture a process.
"""

import importlib.util
import pathlib
import re

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

H100 = "NVIDIA H100 80GB HBM3"
B200 = "NVIDIA B200"
A100 = "NVIDIA A100-SXM4-80GB"
PLUGIN = "jax_plugins.xla_cuda13"


def descriptions() -> dict[str, str]:
    """Returns what XLA wants to know of each GPU that the plugin's library names."""
    spec = importlib.util.find_spec(PLUGIN)
    library = pathlib.Path(spec.submodule_search_locations[0]) / "xla_cuda_plugin.so"
    data, found = library.read_bytes(), {}
    for match in re.finditer(rb"gpu_device_info \{\n", data):
        text = data[match.start() : data.find(b"\0", match.start())].decode(errors="replace")
        name = re.search(r'device_description_str: "([^"]+)"', text)
        if name and len(text) < 40_000:
            found[name.group(1)] = text
    return found


def mesh(name: str, num_devices: int = 1) -> Mesh:
    """Returns a mesh, of one axis "x", of so many GPUs of a name."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=descriptions()[name], topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), ("x",))
