"""Choice of a kernel's backend: the one asked for, or the one for the platform compiled for."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import lax


def run_on_backend(
    kernel: str,
    backend: str | None,
    backends: Mapping[str, Callable[..., Any]],
    platforms: Mapping[str, str],
    *operands: Any,
) -> Any:
    """Returns what a backend makes of the operands.

    With `backend=None` the platform decides when the program is lowered, not when it is traced: a
    step compiled ahead of time on a CPU for a TPU gets the TPU's backend.

    Args:
        kernel: The kernel's name, for errors.
        backend: A key of `backends`, or None for the platform's own.
        backends: Functions of the operands by name. All return the same shapes and dtypes.
        platforms: Name of the backend for each platform that has its own ("cpu", "cuda", "rocm",
            "tpu"), and for "default", every other one.
        *operands: Arrays.

    Raises:
        ValueError: If there is no such backend.
    """
    if backend is not None:
        check_backend(kernel, backend, backends)
        return backends[backend](*operands)
    default = platforms["default"]
    own = {platform: name for platform, name in platforms.items() if name != default}
    if not own:
        return backends[default](*operands)
    choices = {platform: backends[name] for platform, name in own.items()}
    return lax.platform_dependent(*operands, default=backends[default], **choices)


def check_backend(kernel: str, backend: str | None, backends: Mapping[str, Any]) -> None:
    """Raises ValueError, with the names there are, unless `backend` is one of them or None."""
    if backend is not None and backend not in backends:
        raise ValueError(
            f"{kernel} has no backend {backend!r}; set one of {', '.join(sorted(backends))}, "
            "or None for the platform's own."
        )
