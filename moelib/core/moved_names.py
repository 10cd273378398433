"""Names that have moved: what earlier versions wrote into config.txt, and its name today.

A class, function or enum member that a config can name gets a line here when it moves or is
renamed, and a field of a config when it is renamed or removed, so that old runs can be resumed.
"""

import importlib.util
import sys
from collections.abc import Iterable

# Named configs and launchers: their packages in the repository, and in an installed wheel.
EXPERIMENTS = ("experiments", "moelib_experiments")
LAUNCHERS = ("cloud", "moelib_cloud")

# {"module:Name" of an earlier version: "module:Name" today}; covers everything inside a class.
MOVED: dict[str, str] = {}

# {("module:Class" or "module:function" today, field of an earlier version): field today}; None for
# a field that was removed, whose value is ignored.
MOVED_FIELDS: dict[tuple[str, str], str | None] = {}


def current_name(reference: str) -> str:
    """Returns today's name of what `module:qualname` named in an earlier version."""
    known, rest = reference, ""
    while known not in MOVED and "." in known.partition(":")[2]:
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    return MOVED[known] + rest if known in MOVED else reference


def current_field(owners: Iterable[str], field: str) -> str | None:
    """Returns today's name of a config's field, or None if the field was removed.

    `owners` are the names of the config's function, or of its class and the bases of the class.
    """
    for owner in owners:
        if (owner, field) in MOVED_FIELDS:
            return MOVED_FIELDS[owner, field]
    return field


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
    if sys.modules.get(name) is not None:  # Also __main__ of a notebook, which has no spec.
        return True
    parent, _, _ = name.rpartition(".")
    if parent and not _exists(parent):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # The parent is a module, not a package.
        if error.name is not None and name.startswith(error.name):
            return False
        raise
