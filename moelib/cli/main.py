"""The `moelib` command: `moelib <command> [flags]`. Each command is a file of this folder."""

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

import moelib
from moelib.core.config_types import did_you_mean
from moelib.runtime import platforms
from moelib.runtime.command_line import HELP, TRACEBACK, FlagInfo, describe_flags, run_command

# Name: (module, description). The module has a dataclass `Flags` and `run(flags, arguments)`, which
# raises UserError if a flag or an argument is missing or invalid.
COMMANDS = {
    "quickstart": ("moelib.cli.quickstart", "Train a small model on text of this machine."),
    "train": ("moelib.cli.train", "Train a named config, or resume its run."),
    "finetune": ("moelib.cli.finetune", "Fine-tune a Hugging Face model, by adapters or in full."),
    "sweep": ("moelib.cli.sweep", "Train a config with several values, and compare."),
    "launch": ("moelib.cli.launch", "Train in several processes, here or on a cluster."),
    "drill": ("moelib.cli.drill", "Break runs of a config, and check that they recover."),
    "runs": ("moelib.cli.runs", "List, compare, plot or serve runs."),
    "prepare": ("moelib.cli.prepare", "Tokenize a corpus into a token store."),
    "data": ("moelib.cli.data", "Show the batch of a step as text."),
    "config": ("moelib.cli.config", "Print, explain, compare or count a named config."),
    "plan": ("moelib.cli.plan", "Estimate memory, time and cost of a run."),
    "verify": ("moelib.cli.verify", "Check that a config computes the same on every mesh."),
    "generate": ("moelib.cli.generate", "Continue prompts with a trained model."),
    "chat": ("moelib.cli.chat", "Talk to a model on the terminal."),
    "serve": ("moelib.cli.serve", "Answer requests of OpenAI's clients with a model."),
    "inspect": ("moelib.cli.inspect", "Show what a model computes for a text, as a page."),
    "evaluate": ("moelib.cli.evaluate", "Evaluate the checkpoints of a run on benchmarks."),
    "analyze": ("moelib.cli.analyze", "Analyze runs: routing, scaling laws, dense twins."),
    "convert": ("moelib.cli.convert", "Read and write Hugging Face models."),
}


class Command(NamedTuple):
    """A command, as the documentation shows it."""

    summary: str  # One sentence.
    text: str  # Description with examples.
    flags: list[FlagInfo]


def describe_commands() -> dict[str, Command]:
    """Returns every command by name."""
    modules = {name: importlib.import_module(module) for name, (module, _) in COMMANDS.items()}
    return {
        name: Command(COMMANDS[name][1], module.__doc__ or "", describe_flags(module.Flags))
        for name, module in modules.items()
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
    if not argv or argv[0] in {*HELP, "help"}:
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
    platforms.use_most_gpu_memory()
    command = importlib.import_module(COMMANDS[name][0])
    text = command.__doc__ or ""
    return run_command(f"moelib {name}", command.Flags, command.run, arguments, text)


def main() -> None:
    """Runs the command line of this process."""
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        if TRACEBACK in sys.argv:
            raise
        print("moelib: interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    main()
