"""Command lines: flags declared as the fields of a frozen dataclass, and errors on one line.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags:
        seed: int = flag(0, "Seed of the sampling.")

    flags, arguments = parse_flags(Flags, ["--seed=3", "text"])

The annotation gives the kind of a flag: `str`, `int`, `float`, `bool`, `Literal["a", "b"]`, each
also with `| None`, or `tuple[str, ...]` for a flag that may be repeated.
"""

import dataclasses
import errno
import inspect
import logging
import os
import re
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from absl import flags as absl_flags

from moelib.core.config_types import cut, did_you_mean, similar_names
from moelib.core.errors import UsageError, UserError, masked
from moelib.core.trusted_code import is_of_the_user

TRACEBACK = "--traceback"
HELP = frozenset({"--help", "-h", "-help", "--helpfull"})

# Errors of files that the system gives whatever the code does; a missing file may be a bug.
_OF_THE_SYSTEM = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
)


_ADVICE = {  # Instead of the ends of absl's errors.
    "invalid literal .*": "write an integer.",
    "could not convert .*": "write a number.",
    "already defined as .*": "it is set twice; separate its values by commas.",
}


class FlagInfo(NamedTuple):
    """A flag, as `--help` and the documentation show it."""

    name: str  # Name without dashes.
    kind: str  # "text", "integer", "number", "yes/no", or the allowed values, such as "cpu|gpu".
    default: Any  # None if the flag is unset by default.
    repeatable: bool  # Whether the flag may be given several times.
    help: str  # This and the remaining fields are arguments of `flag`.
    short: str | None
    split: bool
    lower_bound: float | None
    of: tuple[str, ...]  # Actions of the command that use the flag; empty for all.


def flag(
    default: Any,
    text: str,
    *,
    short: str | None = None,
    split: bool = False,
    lower_bound: float | None = None,
    of: tuple[str, ...] = (),
) -> Any:
    """Returns the dataclass field of a flag.

    Args:
        default: Default value; None for a flag that is unset by default.
        text: Description for `--help` and the documentation.
        short: One-letter name.
        split: Whether a `tuple[str, ...]` is one value separated by commas, not a repeated flag.
        lower_bound: Smallest allowed number.
        of: The only actions of the command that use the flag; they precede the description.
    """
    text = f"{', '.join(of).capitalize()}: {text}" if of else text
    details = {"help": text, "short": short, "split": split, "lower_bound": lower_bound, "of": of}
    return dataclasses.field(default=default, metadata=details)


def describe_flags(cls: type) -> list[FlagInfo]:
    """Returns the flags of a dataclass: its own before those that it inherits."""
    annotations, own = typing.get_type_hints(cls), inspect.get_annotations(cls)
    ordered = sorted(dataclasses.fields(cls), key=lambda field: field.name not in own)
    return [
        FlagInfo(
            field.name,
            _kind(annotations[field.name]),
            field.default,
            repeatable=isinstance(field.default, tuple) and not field.metadata["split"],
            **field.metadata,
        )
        for field in ordered
    ]


def check_used(flags: Any, field: str, name: str) -> None:
    """Raises UsageError if a flag is set that the action `name` does not use.

    Args:
        flags: Dataclass of flags, of which some have `of`.
        field: What selects the action, for the message.
        name: The action.
    """
    for info in describe_flags(type(flags)):
        if info.of and name not in info.of and getattr(flags, info.name) != info.default:
            users = " or ".join(info.of)
            raise UsageError(f"--{info.name} is of {field} {users}, not {name}; remove it.")


_KINDS = {str: "text", int: "integer", float: "number", bool: "yes/no"}


def _kind(annotation: Any) -> str:
    """Returns the kind of flag that an annotation asks for."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = [each for each in typing.get_args(annotation) if each is not types.NoneType]
    if typing.get_origin(annotation) is Literal:
        return "|".join(typing.get_args(annotation))
    return "text" if typing.get_origin(annotation) is tuple else _KINDS[annotation]


def parse_flags[T](cls: type[T], arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Returns the flags of a command line as a `cls`, and the arguments that are not flags.

    Raises:
        UsageError: If a flag is unknown or its value is invalid.
    """
    values = absl_flags.FlagValues()
    infos = describe_flags(cls)
    for info in infos:
        define_flag(info, values)
    try:
        rest = values(["", *arguments])[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name, names = error.flagname, [info.name for info in infos]
        near = " or ".join(f"'--{each}'" for each in similar_names(name, names))
        advice = f"did you mean {near}?" if near else "--help shows all flags."
        if "set" in names:
            advice += f" If it is a field of the config, --set={name}=... tells its path."
        raise UsageError(f"unknown flag '--{name}'; {advice}") from None
    except absl_flags.Error as error:
        text = str(error)
        for pattern, advice in _ADVICE.items():
            text = re.sub(pattern, advice, text)
        raise UsageError(text) from None
    found = {info.name: values[info.name].value for info in infos}
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    lists |= {info.name: tuple(filter(None, lists[info.name])) for info in infos if info.split}
    return cls(**found | lists), rest


def define_flag(info: FlagInfo, values: absl_flags.FlagValues) -> None:
    """Defines a flag for absl."""
    text = {"name": info.name, "default": info.default, "help": info.help}
    common: dict[str, Any] = {**text, "flag_values": values, "short_name": info.short}
    bounds: dict[str, Any] = {"lower_bound": info.lower_bound}
    match info.kind:
        case "text" if info.repeatable:
            absl_flags.DEFINE_multi_string(**common)
        case "text" if info.split:
            absl_flags.DEFINE_list(**common, allow_overwrite=False)
        case "text":
            absl_flags.DEFINE_string(**common)
        case "integer":
            absl_flags.DEFINE_integer(**common, **bounds)
        case "number":
            absl_flags.DEFINE_float(**common, **bounds)
        case "yes/no":
            absl_flags.DEFINE_bool(**common)
        case choices:
            absl_flags.DEFINE_enum(**common, enum_values=choices.split("|"))


def no_arguments(arguments: Sequence[str], cls: type) -> None:
    """Raises UsageError if a command that takes only flags got other arguments."""
    if arguments:
        names = [f"--{field.name}" for field in dataclasses.fields(cls)]
        advice = did_you_mean(f"--{arguments[0].lstrip('-')}", names)
        raise UsageError(f"unexpected argument {arguments[0]!r}; {advice}")


def check_file(flag: str, path: str | None) -> None:
    """Raises UsageError if the file of a flag cannot be written; None is fine."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path or "."):
        raise UsageError(f"--{flag}={path}: it is a folder; name a file.")
    if not os.path.isdir(folder):
        raise UsageError(f"--{flag}={path}: the folder {folder} does not exist; create it first.")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{flag}={path}: the file is not writable; name another file.")


# -- Running -------------------------------------------------------------------------------------


def run_command[T](
    name: str,
    cls: type[T],
    run: Callable[[T, Sequence[str]], object],
    arguments: Sequence[str],
    text: str = "",
) -> int:
    """Runs a command and returns its exit status: 0, or that of an error of the user, mostly 2.

    An error of the user, or of a file that the system refuses, is printed on one line. Others, and
    `--traceback`, show a traceback.
    `--help` prints the description and the flags instead.

    Args:
        name: Name of the command, before its errors.
        cls: Dataclass of the flags.
        run: Function of the flags, a `cls`, and the other arguments.
        arguments: Command line, without the name.
        text: Description of the command.
    """
    if logging.lastResort is not None:  # Warnings show their origin before any handler is set.
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    # Orbax's log: pages of traces of its threads for an error that it also raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        if HELP & set(arguments):
            print(command_help(cls, text))
        else:
            run(*parse_flags(cls, [each for each in arguments if each != TRACEBACK]))
    except BrokenPipeError:  # The reader of the output, such as `head`, has closed it.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        return 128 + signal.SIGPIPE  # As of a program that the signal ends: it has not finished.
    except (UserError, OSError) as error:
        if TRACEBACK in arguments or not (line := one_line(error)):
            raise
        print(f"{name}: {line}", file=sys.stderr)
        sys.last_exc = error  # As Python does with errors that it prints: see lost_process.
        return getattr(error, "exit_status", UserError.exit_status)
    return 0


def command_help(cls: type, text: str) -> str:
    """Returns the description of a command, and its flags with their defaults."""
    lines = [text.strip(), ""]
    for info in describe_flags(cls):
        name = f"--{info.name}" + (f", -{info.short}" if info.short else "")
        notes = [] if info.kind in ("text", "yes/no") else [info.kind]
        notes += ["repeatable"] if info.repeatable else []
        notes += [f"default: {info.default}"] if info.default not in (None, (), False) else []
        line = f"{name}: {info.help}" + (f" ({'; '.join(notes)})" if notes else "")
        lines += textwrap.wrap(line, 96, subsequent_indent=" " * 8)
    return "\n".join(lines)


def one_line(error: UserError | OSError) -> str:
    """Returns an error's message, where it or its cause is in the user's own code, and a hint.

    Of errors of files, only those have one that the system gives whatever the code does.
    """
    if not isinstance(error, UserError):
        file = error.filename2 or error.filename or "A file"  # The target of a copy, or the file.
        text = ". ".join([f"{file}: {error.strerror}", *getattr(error, "__notes__", ())])
        text = masked(f"{text} ({TRACEBACK} shows more)")
        return text if error.errno in _OF_THE_SYSTEM else ""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    message = cut(" ".join(text.split()), 2000)
    if isinstance(error, UsageError):
        return message
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    frames = [frame for each in causes for frame in traceback.extract_tb(each.__traceback__)]
    own = [frame for frame in frames if is_of_the_user(frame.filename)]
    origin = f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}; " if own else ""
    return f"{message} ({origin}{TRACEBACK} shows more)"
