"""The sections of the CLI reference, from the flags and docstrings of the commands."""

import textwrap
from collections.abc import Sequence

from benchmarks import __main__ as benchmarks
from moelib.cli.main import Command, describe_commands
from moelib.runtime.command_line import FlagInfo, describe_flags

_TRAIN = "moelib train"


def commands() -> dict[str, Command]:
    """Returns the commands that have a section, by the words that begin their command lines."""
    found = {f"moelib {name}": each for name, each in describe_commands().items()}
    summary = "Measure parts of a training step on this machine (in the repository)."
    flags = describe_flags(benchmarks.Flags)
    return {**found, "python -m benchmarks": Command(summary, benchmarks.__doc__ or "", flags)}


def sections() -> str:
    """Returns a section for each command: its description, and its flags.

    Flags that equal those of `moelib train` are described there alone.
    """
    found = commands()
    shared = found[_TRAIN].flags
    parts = []
    for name, command in found.items():
        flags = [flag for flag in command.flags if name == _TRAIN or flag not in shared]
        others = [f"`--{flag.name}`" for flag in command.flags if flag not in flags]
        parts.append(f"## {name}\n\n{command.summary}\n\n{_as_markdown(command.text)}")
        parts.append(_flag_table(flags))
        if others:
            text = f"Flags of [{_TRAIN}](#{_TRAIN.replace(' ', '-')}): {', '.join(others)}."
            parts.append(textwrap.fill(text, 120, break_long_words=False) + "\n")
    return "\n".join(parts)


def _as_markdown(docstring: str) -> str:
    """Returns a docstring with its examples and lists fenced."""
    _, *paragraphs = docstring.strip().split("\n\n")
    lines = []
    for paragraph in paragraphs:
        is_code = paragraph.startswith(("    ", "moelib "))
        language = "bash" if paragraph.lstrip().startswith("moelib ") else "text"
        text = textwrap.dedent(paragraph)
        lines.append(f"```{language}\n{text}\n```\n" if is_code else f"{text}\n")
    return "\n".join(lines)


def _flag_table(flags: Sequence[FlagInfo]) -> str:
    """Returns a Markdown table of flags."""
    lines = ["| Flag | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for flag in flags:
        name = f"`--{flag.name}`" + (f", `-{flag.short}`" if flag.short else "")
        kind = flag.kind.replace("|", ", ")
        kind += f", at least {flag.lower_bound}" if flag.lower_bound is not None else ""
        kind += ", repeatable" if flag.repeatable else ", separated by commas" if flag.split else ""
        default = "" if flag.default in (None, ()) else f"`{flag.default}`"
        default = {"`True`": "yes", "`False`": "no"}.get(default, default)
        lines.append(f"| {name} | {kind} | {default} | {flag.help.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
