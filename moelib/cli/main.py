"""The `moelib` command: `moelib <command> [flags]`. Each command is a file of this folder."""

import importlib
import os
import sys
import sysconfig
import textwrap
import traceback
import types
from collections.abc import Sequence

from absl import flags

from moelib.core.config import did_you_mean

# Name: (module, what it does). The module has define_flags() and run(args) -> None.
COMMANDS = {
    "train": ("moelib.cli.train", "Trains a named config; run again, it resumes."),
    "prepare": ("moelib.cli.prepare", "Tokenizes a corpus into a token store."),
    "config": ("moelib.cli.config", "Prints, explains, compares or counts a named config."),
    "plan": ("moelib.cli.plan", "Says whether a run fits, how fast, at what cost."),
    "verify": ("moelib.cli.verify", "Checks that a config computes the same on every mesh."),
    "generate": ("moelib.cli.generate", "Continues a prompt with a trained model."),
    "evaluate": ("moelib.cli.evaluate", "Answers benchmarks with the checkpoints of a run."),
    "convert": ("moelib.cli.convert", "Reads and writes models of Hugging Face."),
    "bench": ("moelib.cli.bench", "Moved: python -m benchmarks, in the repository."),
    "quickstart": ("moelib.cli.quickstart", "Trains a small model on text of this machine."),
}


def usage() -> str:
    """Returns the text of `moelib --help`."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["Usage: moelib <command> [flags]", "", *lines, "", "moelib <command> --help: its flags."]
    )


def run(argv: Sequence[str]) -> int:
    """Runs a command line (without the program's name) and returns the exit status."""
    if not argv or argv[0] in ("--help", "-h", "help", "--helpfull"):
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        print(f"moelib: no command {name!r}; {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(COMMANDS[name][0])
    command.define_flags()
    if {"--help", "-h", "-help", "--helpfull"} & set(argv[1:]):
        print(command_help(command))
        return 0
    try:
        rest = flags.FLAGS([f"moelib {name}", *argv[1:]])[1:]
    except flags.Error as error:
        print(f"moelib {name}: {error}", file=sys.stderr)
        return 2
    return _run_command(name, command, rest)


def _run_command(name: str, command: types.ModuleType, rest: Sequence[str]) -> int:
    """Runs a command. What the user can mend is one line; anything else keeps its traceback."""
    try:
        command.run(rest)
    except BrokenPipeError:  # The reader of our output, such as head, has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    except Exception as error:
        if not _says_what_to_mend(error):
            raise
        print(f"moelib {name}: {error}", file=sys.stderr)
        return 2
    return 0


def _says_what_to_mend(error: Exception) -> bool:
    """Returns whether an error is about the user's flags or files, and says all.

    One that comes from a line of the user's own module keeps its traceback.
    """
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    python = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep, "<")
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(not file.startswith((ours, *python)) for file in files):
        return False
    if isinstance(error, FileNotFoundError):
        return error.errno is None  # Those of the operating system do not say what to do.
    from moelib.checkpoint.contents import CheckpointMismatchError, DamagedCheckpointError
    from moelib.checkpoint.safetensors import DamagedTensorsError
    from moelib.core import config
    from moelib.core.errors import UserError
    from moelib.train.identity import TrainerDirConflictError

    return isinstance(
        error,
        UserError
        | config.InvalidConfigNameError
        | config.InvalidConfigValueError
        | config.RequiredFieldMissingError
        | config.UnknownFieldError
        | CheckpointMismatchError
        | DamagedCheckpointError
        | DamagedTensorsError
        | TrainerDirConflictError,
    )


def command_help(command: types.ModuleType) -> str:
    """Returns what a command does, and its flags with their defaults."""
    lines = [(command.__doc__ or "").strip(), ""]
    for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items()):
        if module.startswith("moelib."):
            for flag in defined:
                default = "" if flag.default in (None, []) else f" (default: {flag.default})"
                lines += textwrap.wrap(
                    f"--{flag.name}: {flag.help}{default}", 96, subsequent_indent=" " * 8
                )
    return "\n".join(lines)


def main() -> None:
    """Runs the command line of this process."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
