"""Versions of the libraries that affect the numbers of a run."""

import importlib.metadata
import platform


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that affect a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in ("moelib", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
            versions[name] = "unknown"
    return versions
