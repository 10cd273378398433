"""Choice of kernel backends by a user; `moelib.kernels.backend` has the precedence.

with kernel_backends({"gmm": "xla"}):
    ...  # Programs traced here compute grouped matmuls in plain XLA.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping

from moelib.core.errors import UserError
from moelib.kernels.backend import (
    BACKENDS,
    BackendError,
    backends_of_environment,
    traced_backends,
    use_backends,
)

__all__ = ["BACKENDS", "kernel_backends", "warn_unused_backends"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def kernel_backends(backends: Mapping[str, str | None] | None = None) -> Iterator[None]:
    """Sets the backends of the kernels named for what is traced inside, over the environment's.

    Args:
        backends: Backend by kernel, both as in `BACKENDS`, or None for the default of the device;
            other kernels keep theirs.

    Raises:
        UserError: If a kernel or a backend is unknown, here or in MOELIB_KERNEL_BACKEND, or if a
            backend cannot compute what is traced inside.
    """
    try:
        backends_of_environment()
        with use_backends(backends or {}):
            yield
    except BackendError as error:
        raised = UserError(str(error))
        raised.__notes__ = getattr(error, "__notes__", [])  # The layer that it happened in.
        raise raised from error


def warn_unused_backends(backends: Mapping[str, str]) -> None:
    """Logs a warning for each kernel that a backend is set for and that nothing has traced."""
    for kernel in backends.keys() - traced_backends().keys():
        logger.warning(
            "kernel_backends[%r] is %r, but no layer uses this kernel; remove it.",
            kernel,
            backends[kernel],
        )
