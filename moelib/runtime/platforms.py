"""Platforms that JAX computes on: which one to use, and what to install where it is missing."""

import glob
import importlib.util
import os

from moelib.core.errors import UsageError

_SETTINGS_OF_TPU_VMS = ("TPU_NAME", "TPU_WORKER_ID")
_PLUGINS = {
    "cpu": ("jax",),
    "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "tpu": ("libtpu",),
}


def has_tpu() -> bool:
    """Returns whether this machine has TPUs, as far as its device files and settings show."""
    files = [*glob.glob("/dev/accel*"), *glob.glob("/dev/vfio/[0-9]*")]
    return bool(files) or any(name in os.environ for name in _SETTINGS_OF_TPU_VMS)


def has_gpu() -> bool:
    """Returns whether this machine has NVIDIA GPUs, and JAX's plugin for them."""
    plugins = (importlib.util.find_spec(plugin) for plugin in _PLUGINS["gpu"])
    return bool(glob.glob("/dev/nvidia[0-9]*")) and any(plugins)


def has_accelerator() -> bool:
    """Returns whether JAX would open a TPU or GPU, as far as files and settings show."""
    import jax

    on_cpus = (jax.config.jax_platforms or "").startswith("cpu")
    return not on_cpus and (has_tpu() or has_gpu())


def hide_absent_tpus() -> None:
    """Prevents the errors that libtpu prints where there is no TPU; call it before importing JAX.

    Programs for TPUs can still be compiled.
    """
    if has_tpu() or importlib.util.find_spec("libtpu") is None:
        return
    from importlib import metadata  # Slow to import.

    if not metadata.entry_points(group="jax_plugins"):  # No plugin for GPUs either.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    describe_absent_tpus()


# Share of a GPU's memory that a process takes.
GPU_MEMORY_SHARE = 0.92


def use_most_gpu_memory() -> None:
    """Lets a process take GPU_MEMORY_SHARE, not JAX's 75%, unless the user set a share.

    The rest is for CUDA and NCCL, which allocate their own. Call it before JAX starts.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # The name before; JAX refuses both.
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


def describe_absent_tpus() -> None:
    """Gives libtpu the settings that it would request from a cloud's metadata server."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # A lock file reserves TPUs for one process; compiling takes no TPU.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def use_backend(name: str) -> None:
    """Makes JAX use a platform: "cpu", "gpu" or "tpu"."""
    import jax

    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(name, name))


def check_backend(name: str) -> None:
    """Checks that the devices of a platform can be used. This initializes them.

    Raises:
        UsageError: If JAX finds none; the message has the reason and the package to install.
    """
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS[name]):
        raise UsageError(
            f"--jax_backend={name}: JAX's plugin for it is not installed; "
            f"pip install 'moelib[{name}]', or leave the flag unset to use what is found."
        )
    check_devices(f"--jax_backend={name}")


def check_devices(setting: str) -> None:
    """Opens the devices that a setting, such as "--jax_backend=gpu", selects.

    Raises:
        UsageError: If JAX finds none; the message has the reason.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["JAX cannot load its plugin"])[0]
        raise UsageError(
            f"{setting}: no such device can be used on this machine ({reason}); check its driver, "
            "or leave it unset to use what is found."
        ) from error
