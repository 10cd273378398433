"""The `moelib` command: `moelib <command> [flags]`. Each command is a file of this folder."""

import importlib
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

import moelib
from moelib.core import platforms
from moelib.core.command_line import TRACEBACK, FlagInfo, describe_flags, one_line, run_command
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError

# Name: (module, description). The module has a dataclass `Flags` and `run(flags, arguments)`.
COMMANDS = {
    "quickstart": ("moelib.cli.quickstart", "Train a small model on text of this machine."),
    "train": ("moelib.cli.train", "Train a named config, or resume its run."),
    "prepare": ("moelib.cli.prepare", "Tokenize a corpus into a token store."),
    "config": ("moelib.cli.config", "Print, explain, compare or count a named config."),
    "plan": ("moelib.cli.plan", "Estimate memory, time and cost of a run."),
    "verify": ("moelib.cli.verify", "Check that a config computes the same on every mesh."),
    "generate": ("moelib.cli.generate", "Continue prompts with a trained model."),
    "evaluate": ("moelib.cli.evaluate", "Evaluate the checkpoints of a run on benchmarks."),
    "convert": ("moelib.cli.convert", "Read and write Hugging Face models."),
    "bench": ("moelib.cli.bench", "Moved to python -m benchmarks."),
}
_HELP = {"--help", "-h", "-help", "--helpfull"}


class Command(NamedTuple):
    """A command, as `--help` and the documentation show it.

    Attributes:
        summary: Description of one sentence.
        text: Description with examples.
        flags: Its flags.
    """

    summary: str
    text: str
    flags: list[FlagInfo]


def describe_commands() -> dict[str, Command]:
    """Returns every command by name."""
    modules = {name: importlib.import_module(module) for name, (module, _) in COMMANDS.items()}
    return {
        name: Command(
            COMMANDS[name][1], (module.__doc__ or "").strip(), describe_flags(module.Flags)
        )
        for name, module in modules.items()
        if hasattr(module, "Flags")
    }


def usage() -> str:
    """Returns the text of `moelib --help`."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: moelib <command> [flags]",
            "",
            *lines,
            "",
            "moelib <command> --help shows the flags of a command, moelib --version the version.",
            f"{TRACEBACK} shows where an error was raised.",
        ]
    )


def run(argv: Sequence[str]) -> int:
    """Runs a command line (without the program's name) and returns the exit status."""
    if not argv or argv[0] in {*_HELP, "help"}:
        print(usage())
        return 0 if argv else 2
    name, *arguments = argv
    if name == "--version":
        print(f"moelib {moelib.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"moelib: unknown command {name!r}; {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    platforms.hide_absent_tpus()
    command = importlib.import_module(COMMANDS[name][0])
    if not hasattr(command, "Flags"):
        return _run_with_absl(name, command, arguments)
    if _HELP & set(arguments):
        print(command_help(command))
        return 0
    return run_command(f"moelib {name}", command.Flags, command.run, arguments)


def command_help(command: types.ModuleType) -> str:
    """Returns the description of a command, and its flags with their defaults."""
    lines = [(command.__doc__ or "").strip(), ""]
    for info in describe_flags(command.Flags):
        name = f"--{info.name}" + (f", -{info.short}" if info.short else "")
        notes = [] if info.kind in ("text", "yes/no") else [info.kind]
        notes += ["repeatable"] if info.repeatable else []
        notes += [f"default: {info.default}"] if info.default not in (None, (), False) else []
        text = f"{name}: {info.help}" + (f" ({'; '.join(notes)})" if notes else "")
        lines += textwrap.wrap(text, 96, subsequent_indent=" " * 8)
    return "\n".join(lines)


def main() -> None:
    """Runs the command line of this process."""
    sys.exit(run(sys.argv[1:]))


# -- Commands that do not declare their flags yet ------------------------------------------------


def _run_with_absl(name: str, command: types.ModuleType, arguments: Sequence[str]) -> int:
    command.define_flags()
    if _HELP & set(arguments):
        print((command.__doc__ or "").strip(), "\n")
        for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items()):
            if module.startswith("moelib."):
                for flag in defined:
                    default = "" if flag.default in (None, []) else f" (default: {flag.default})"
                    text = f"--{flag.name}: {flag.help}{default}"
                    print("\n".join(textwrap.wrap(text, 96, subsequent_indent=" " * 8)))
        return 0
    try:
        command.run(flags.FLAGS([name, *(a for a in arguments if a != TRACEBACK)])[1:])
    except flags.Error as error:
        print(f"moelib {name}: {error}", file=sys.stderr)
        return 2
    except UserError as error:
        if TRACEBACK in arguments:
            raise
        print(f"moelib {name}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    main()
