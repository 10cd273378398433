"""What XLA's compiler knows of each GPU: texts inside the library of JAX's CUDA plugin."""

import functools
import importlib.util
import mmap
import pathlib
import re

PLUGIN = "jax_plugins.xla_cuda13"
_LIBRARY = "xla_cuda_plugin.so"
_MAX_CHARACTERS = 40_000  # The texts have some 6,000; what is longer is something else.


def is_installed() -> bool:
    """Returns whether the CUDA plugin is there; nothing is loaded."""
    try:
        return importlib.util.find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # Not even the folder of plugins.
        return False


@functools.cache
def target_configs() -> dict[str, str]:
    """Returns for each GPU, by its full name, what `get_topology_desc` takes as `target_config`.

    Raises:
        ModuleNotFoundError: Without the plugin.
    """
    spec = importlib.util.find_spec(PLUGIN)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{PLUGIN} is not installed; pip install 'moelib[plan-gpu]'.")
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
    """Returns the text for what JAX calls a device, under that name, or None if there is none.

    The compiler may call it at greater length: "NVIDIA H200 141GB HBM3e" is "NVIDIA H200" on a
    machine that has one. A part of a GPU (MIG) is another.
    """
    configs = target_configs()
    names = [name for name in configs if name.startswith(f"{device_kind} ") and "MIG" not in name]
    for name in (device_kind, *names):
        if name in configs:
            return configs[name].replace(f'_str: "{name}"', f'_str: "{device_kind}"')
    return None


def memory_bytes(config: str) -> int:
    """Returns the memory of the GPU of a text of `target_configs`."""
    found = re.search(r"\bdevice_memory_size: (\d+)", config)
    assert found is not None, config[:200]
    return int(found.group(1))
