"""Secrets of configs: a field holds a reference to a secret, never the secret itself."""

import os
import re
import typing
from typing import Any

from moelib.core.config_types import InvalidConfigValueError
from moelib.core.errors import UserError
from moelib.runtime.storage import read_text

_REFERENCE = re.compile(r"env:[A-Z_][A-Z0-9_]*|file:/.*[^/]")
_CURE = "set env:NAME, of an environment variable, or file:PATH, of a file with an absolute path"

if typing.TYPE_CHECKING:
    Secret = Any  # Set as a string.
else:

    class Secret(str):
        """A reference to a secret, `env:NAME` or `file:PATH`.

        Text, copies and records of a config hold the reference. A config refuses anything else,
        without showing it: a value on a command line is visible to all users of the machine.
        """

        __slots__ = ()
        __config_secret__ = True

        def __new__(cls, reference: Any) -> "Secret":
            """Returns a reference. Raises InvalidConfigValueError for other values."""
            if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
                raise InvalidConfigValueError(f"the value, not shown, is no reference; {_CURE}")
            return super().__new__(cls, reference)

        __config_convert__ = classmethod(lambda cls, value: cls(value))

        def value(self) -> str:
            """Returns the secret, without spaces and newlines around it.

            Raises:
                UserError: If the variable or the file is missing or empty.
            """
            kind, _, name = self.partition(":")
            found = os.environ.get(name, "") if kind == "env" else read_text(name)
            if not found.strip():
                raise UserError(f"{self!s}: the secret is missing or empty; set it, or {_CURE}.")
            return found.strip()
