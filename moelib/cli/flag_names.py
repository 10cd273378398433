"""Flags with a new name: the old name is accepted for one version, with a warning."""

import sys
from typing import Any

from absl import flags


def define_renamed(old: str, new: str) -> None:
    """Makes `--old` set the flag `--new`, which must be defined already."""
    flags.DEFINE_alias(old, new)
    alias: Any = flags.FLAGS[old]
    parse = alias.parse

    def parse_with_warning(argument: Any) -> None:
        print(f"--{old} is now --{new}; the old name will be removed.", file=sys.stderr)
        parse(argument)

    alias.parse = parse_with_warning
