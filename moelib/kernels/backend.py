"""Choice and execution of a kernel's backend.

The first of these that names a backend for the kernel decides:

1. The argument `backend` of the kernel's entry.
2. `kernel_backends({"gmm": "xla"})`, the innermost context first. The trainer enters one with its
   field of this name.
3. The environment variable MOELIB_KERNEL_BACKEND, such as `gmm=xla,flash_attention=cudnn`.
4. The kernel's default for the device that the program is compiled for.

The choice is made while a program is traced. Contexts are part of the key of `jax.jit`'s caches;
the environment is not, so it must be set before the first trace.
"""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from moelib.core.errors import UserError

ENVIRONMENT = "MOELIB_KERNEL_BACKEND"

# `reference` is the definition, dense and slow; `xla` runs everywhere.
BACKENDS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("reference", "xla"),
    "flash_attention": ("cudnn", "gpu", "reference", "tpu", "xla"),
    "gmm": ("gpu", "reference", "tpu", "xla"),
    "quantized_matmul": ("float8", "reference", "straight_through", "xla"),
}
_PLATFORM = {"cudnn": "gpu", "gpu": "gpu", "tpu": "tpu"}  # The others run on every platform.
_INTERPRETED = ("tpu", "gpu")  # Pallas kernels, which CPUs interpret, for tests.

_logger = logging.getLogger(__name__)
_context = jax.make_user_context(())  # ((kernel, backend), ...)
_traced: dict[str, str] = {}  # The backend of each kernel when it was last traced.


class Call(NamedTuple):
    """A call of a kernel, as it was traced: all that the kernel's program depends on."""

    kernel: str
    function: Callable[..., jax.Array]  # Of operands and options, by name.
    operands: tuple[tuple[str, tuple[int, ...], str], ...]  # Name, shape and dtype of each.
    options: tuple[tuple[str, Any], ...]  # Static arguments, hashable.

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in self.operands)
        options = ", ".join(getattr(x, "__name__", str(x)) for _, x in self.options)
        options = re.sub(" at 0x[0-9a-f]+", "", options)  # Of functions, other in each process.
        return f"{self.function.__name__}({shapes}{', ' * bool(options)}{options})"


class Device(NamedTuple):
    """The device that a program is compiled for."""

    platform: str  # "cpu", "gpu" or "tpu".
    kind: str  # Such as "NVIDIA H100 80GB HBM3".
    num_cores: int | None  # Streaming multiprocessors of a GPU, if known.


def current_device() -> Device:
    """Returns the device of the mesh in context, else the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        platform, kind, cores = device.platform, device.device_kind, device.num_cores
    else:
        first = jax.devices()[0]
        platform, kind, cores = first.platform, first.device_kind, None
        cores = getattr(first, "core_count", None) if platform == "gpu" else None
    return Device("gpu" if platform in ("cuda", "rocm") else platform, kind, cores)


# ------------------------------------------------------------------------------------------------
# Choice


@contextlib.contextmanager
def kernel_backends(backends: Mapping[str, str | None] | None = None) -> Iterator[None]:
    """Sets the backends of the kernels named for what is traced inside, over the environment's.

    Args:
        backends: Backend by kernel, both as in `BACKENDS`, or None for the default of the device,
            whatever the environment says; other kernels keep theirs.

    Raises:
        UserError: If a kernel or a backend is unknown, here or in MOELIB_KERNEL_BACKEND; names the
            known ones.
    """
    backends_of_environment()
    _check(backends or {}, f"kernel_backends={dict(backends or {})}: ")
    with _context(tuple({**dict(_context.value), **(backends or {})}.items())):
        yield


def chosen_backend(kernel: str, argument: str | None = None) -> str | None:
    """Returns the backend that is set for a kernel, or None for the device's default.

    Raises:
        UserError: If the argument `backend` of the kernel's entry, or the environment, names an
            unknown one.
    """
    environment = backends_of_environment()
    if argument is not None:
        _check({kernel: argument})
        return argument
    chosen = {**environment, **dict(_context.value)}.get(kernel)
    if chosen in _INTERPRETED and current_device().platform == "cpu":
        warn_once(f"{kernel}: backend {chosen!r} is interpreted on CPUs, which is very slow.")
    return chosen


def backends_of_environment() -> Mapping[str, str]:
    """Returns the backends that MOELIB_KERNEL_BACKEND sets, by kernel.

    Raises:
        UserError: If it is malformed, or names an unknown kernel or backend.
    """
    return _parsed(os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _parsed(text: str) -> Mapping[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise UserError(
            f"{ENVIRONMENT}={text}: set kernel=backend pairs joined by commas, such as "
            "gmm=xla,flash_attention=cudnn."
        )
    backends = {kernel: backend for kernel, _, backend in pairs}
    _check(backends, f"{ENVIRONMENT}={text}: ")
    return backends


def _check(backends: Mapping[str, str | None], source: str = "") -> None:
    for kernel, backend in backends.items():
        if kernel not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise UserError(f"{source}unknown kernel {kernel!r}; the kernels are {known}.")
        if backend is not None and backend not in BACKENDS[kernel]:
            known = ", ".join(BACKENDS[kernel])
            raise UserError(f"{source}{kernel} has no backend {backend!r}; it has {known}.")


def traced_backends() -> Mapping[str, str]:
    """Returns the backend of each kernel when it was last traced, for reports."""
    return dict(_traced)


def warn_unused_backends(backends: Mapping[str, str]) -> None:
    """Logs a warning for each kernel that a backend is set for and that nothing has traced."""
    for kernel in backends.keys() - _traced.keys():
        _logger.warning(
            "kernel_backends[%r] is %r, but no layer uses this kernel; remove it.",
            kernel,
            backends[kernel],
        )


def how_to_set(kernel: str, backend: str) -> str:
    """Returns an imperative clause that tells a user how to set a backend."""
    return (
        f"set the trainer's kernel_backends={{{kernel!r}: {backend!r}}} or the environment "
        f"variable {ENVIRONMENT}={kernel}={backend}"
    )


@functools.cache
def warn_once(message: str) -> None:
    """Logs a message at WARNING the first time that it is given."""
    _logger.warning("%s", message)


# ------------------------------------------------------------------------------------------------
# Records


_recording: list[list[Call]] = []  # Lists that calls are added to.


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Yields a list that receives each different call of a kernel that is traced in the body."""
    calls: list[Call] = []
    _recording.append(calls)
    try:
        yield calls
    finally:
        _recording.remove(calls)


def record(
    kernel: str, function: Callable[..., jax.Array], operands: Mapping[str, Any], **options: Any
) -> None:
    """Adds a call of a kernel to the lists of `recorded_calls`; None is no operand."""
    if not _recording:
        return
    given = ((name, x) for name, x in operands.items() if x is not None)
    shapes = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in given)
    call = Call(kernel, function, shapes, tuple(options.items()))
    for calls in _recording:
        if call not in calls:
            calls.append(call)


# ------------------------------------------------------------------------------------------------
# Running


def run(
    kernel: str,
    backend: str | None,
    forms: Mapping[str, Callable[..., Any]],
    reasons: Mapping[str, str | None],
    *operands: Any,
) -> Any:
    """Returns the result of a backend.

    With `backend=None` the platform decides when the program is lowered, not when it is traced: a
    step compiled ahead of time on a CPU for a TPU gets the TPU's backend. Plain XLA instead of it
    is reported once, with the reason.

    Args:
        kernel: Name of the kernel.
        backend: Name of the backend, from `chosen_backend`; None for the default.
        forms: Functions of the operands by backend, which return the same shapes and dtypes.
            Those of Pallas kernels take `interpret` too.
        reasons: Reason why a backend cannot take the operands, and what to do, or None if it can.
            "tpu" and "gpu" without a reason are the defaults of their platforms.
        *operands: Trees of arrays.

    Raises:
        UserError: If the backend cannot take the operands, is for another platform, or has no
            such form.
    """
    device = current_device()
    if backend is None:
        return _run_default(kernel, forms, reasons, device, *operands)
    or_xla = how_to_set(kernel, "xla")
    if backend not in forms:
        raise UserError(f"{kernel}: backend {backend!r} cannot compute this part; {or_xla}.")
    if reason := reasons.get(backend):
        raise UserError(f"{kernel}: backend {backend!r} {reason} Or {or_xla}.")
    _traced[kernel] = backend
    if device.platform == "cpu" and backend in _INTERPRETED:
        return forms[backend](*operands, interpret=True)
    if device.platform != _PLATFORM.get(backend, device.platform):
        raise UserError(f"{kernel}: backend {backend!r} does not run on {device.kind}; {or_xla}.")
    return forms[backend](*operands)


def _run_default(
    kernel: str,
    forms: Mapping[str, Callable[..., Any]],
    reasons: Mapping[str, str | None],
    device: Device,
    *operands: Any,
) -> Any:
    if reason := reasons.get(device.platform):
        warn_once(
            f"{kernel} runs in plain XLA on {device.kind}, which is slow: the kernel for "
            f"{device.platform.upper()}s {reason} To run it so without this warning, "
            f"{how_to_set(kernel, 'xla')}."
        )
    own = [name for name in _INTERPRETED if name in reasons and reasons[name] is None]
    _traced[kernel] = device.platform if device.platform in own else "xla"
    if not own:
        return forms["xla"](*operands)
    by_platform = {{"gpu": "cuda"}.get(name, name): forms[name] for name in own}
    return lax.platform_dependent(*operands, default=forms["xla"], **by_platform)
