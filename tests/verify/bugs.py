"""Planted bugs: functions that replace others of moelib."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from moelib.core.module import in_context


class Bug(NamedTuple):
    """A wrong function, and how it is found."""

    replacement: Callable[..., Any]  # Takes the function that it replaces, and the arguments of it.
    owner: Any  # The class or module of the function.
    attribute: str
    expected: str  # The check that finds it first, or what the check names.
    config: Callable[[], Any] | None  # A trainer config that has the function, if not all have it.

    @property
    def name(self) -> str:
        """The name of the replacement."""
        return self.replacement.__name__

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the function until the end of the test."""
        known = getattr(self.owner, self.attribute)

        @functools.wraps(known)
        def wrong(*args: Any, **options: Any) -> Any:
            return self.replacement(known, *args, **options)

        is_layer = isinstance(self.owner, type) and self.attribute == "forward"
        monkeypatch.setattr(self.owner, self.attribute, in_context(wrong) if is_layer else wrong)


def replaces(
    owner: Any, attribute: str, expected: str = "", config: Callable[[], Any] | None = None
) -> Callable[[Callable[..., Any]], Bug]:
    """Returns a decorator that makes a bug of a function."""
    return lambda replacement: Bug(replacement, owner, attribute, expected, config)
