"""Simulated devices: several on the CPU, whose collectives must not wait for each other."""

import os
import re

_ONE_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"
_NUM_THREADS = "PJRT_NPROC"  # Of XLA's pool; it has as many as devices or cores at least.
_THREADS_PER_DEVICE = 8


def prepare() -> None:
    """Sets what XLA:CPU reads when JAX starts, for as many devices as the environment asks for.

    In its default order of operations, breadth first, some devices may wait in a ring's permutation
    and the others in an all-reduce, for ever. In one order, a device may still begin the collective
    that follows a loop before those inside the loop, and each waits in a thread of the pool. Where
    half of the devices wait in one, and half in another, no thread of a small pool remains.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _ONE_ORDER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_ONE_ORDER}=false".lstrip()
    asked = re.findall(r"xla_force_host_platform_device_count=(\d+)", flags)
    asked += re.findall(r"^\d+$", os.environ.get("JAX_NUM_CPU_DEVICES", ""))
    _add_threads(max(map(int, asked), default=1))


def simulate_devices(num: int) -> None:
    """Lets JAX have a number of devices on the CPU.

    Raises RuntimeError if JAX has started.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", num)
    _add_threads(num)


def _add_threads(num_devices: int) -> None:
    """Gives each of several devices threads.

    A single device is slower with more threads than cores, by up to a fifth.
    """
    threads = max(os.cpu_count() or 1, _THREADS_PER_DEVICE * num_devices)
    given = os.environ.get(_NUM_THREADS, "")
    if num_devices > 1 and (not given.isdecimal() or int(given) < threads):
        os.environ[_NUM_THREADS] = str(threads)
