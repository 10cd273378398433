"""`moelib train`: trains a named config; the same command again resumes it."""

from collections.abc import Sequence

from moelib import launch


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_train_flags()


def run(args: Sequence[str]) -> None:
    """Trains."""
    launch.main(["train", *args])
