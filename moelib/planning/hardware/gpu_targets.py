"""XLA's descriptions of GPUs, which are texts inside the library of JAX's CUDA plugin."""

import functools
import importlib.util
import mmap
import pathlib
import re

PLUGIN = "jax_plugins.xla_cuda13"
_LIBRARY = "xla_cuda_plugin.so"
_MAX_CHARACTERS = 40_000  # A description has some 6,000; longer texts are something else.


def is_installed() -> bool:
    """Returns whether the CUDA plugin is installed, without loading it."""
    try:
        return importlib.util.find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # There is no folder of plugins.
        return False


@functools.cache
def target_configs() -> dict[str, str]:
    """Returns the descriptions, for `get_topology_desc(target_config=)`, by name of the GPU."""
    spec = importlib.util.find_spec(PLUGIN)
    assert spec is not None
    assert spec.submodule_search_locations, PLUGIN
    library = pathlib.Path(spec.submodule_search_locations[0]) / _LIBRARY
    found = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in re.finditer(rb"gpu_device_info \{\n", data):
            end = data.find(b"\0", match.start(), match.start() + _MAX_CHARACTERS)
            text = data[match.start() : end].decode() if end != -1 else ""
            if name := re.search(r'device_description_str: "([^"]+)"', text):
                found[name.group(1)] = text
    return found


def target_config(device_kind: str) -> str | None:
    """Returns the description for JAX's name of a GPU, under that name, or None if there is none.

    The compiler's name may be longer: "NVIDIA H200 141GB HBM3e" is "NVIDIA H200" on a machine that
    has one. Parts of a GPU (MIG) have descriptions of their own.
    """
    configs = target_configs()
    names = [name for name in configs if name.startswith(f"{device_kind} ") and "MIG" not in name]
    for name in (device_kind, *names):
        if name in configs:
            return configs[name].replace(f'_str: "{name}"', f'_str: "{device_kind}"')
    return None
