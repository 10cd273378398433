"""Modules with two names: in the repository, and in an installed wheel."""

import importlib.util
import itertools
import sys

# Named configs and launchers.
EXPERIMENTS = ("experiments", "moelib_experiments")
LAUNCHERS = ("cloud", "moelib_cloud")


def find_module(name: str) -> str | None:
    """Returns the name under which a module can be imported here, or None; imports its parents.

    The named configs are `experiments` in the repository and `moelib_experiments` in the wheel,
    the launchers `cloud` and `moelib_cloud`; either name finds both.
    """
    top, dot, rest = name.partition(".")
    names = [name]
    for pair in (EXPERIMENTS, LAUNCHERS):
        if top in pair:
            names += [other + dot + rest for other in pair if other != top]
    return next(filter(_exists, names), None)


def _exists(name: str) -> bool:
    """Returns whether a module can be imported; its parents are, the outermost first."""
    parents = itertools.accumulate(name.split("."), lambda parent, child: f"{parent}.{child}")
    return all(_is_there(each) for each in parents)


def _is_there(name: str) -> bool:
    """Returns whether a module exists, whose parent does."""
    if sys.modules.get(name) is not None:  # Also __main__ of a notebook, which has no spec.
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # The parent is a module, not a package.
        if error.name is not None and name.startswith(error.name):
            return False
        raise
