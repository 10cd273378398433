"""Versions of the libraries that affect the numbers of a run."""

import importlib.metadata
import platform


def library_versions(*more: str) -> dict[str, str]:
    """Returns the versions of Python, of the libraries that affect a run's numbers, and of more."""
    versions = {"python": platform.python_version()}
    for name in ("moelib", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", *more):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # Not installed, as a checkout.
            versions[name] = "unknown"
    return versions
