"""Choice of kernel backends by a user; `moelib.kernels.backend` has the precedence.

with kernel_backends({"gmm": "xla"}):
    ...  # Programs traced here compute grouped matmuls in plain XLA.
"""

import contextlib
from collections.abc import Iterator, Mapping

from moelib.core.errors import UserError
from moelib.kernels.backend import (
    BACKENDS,
    BackendError,
    backends_of_environment,
    use_backends,
)

__all__ = ["BACKENDS", "kernel_backends"]


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
