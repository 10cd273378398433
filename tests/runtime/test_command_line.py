"""Flags declared by dataclasses, and the errors of commands on one line."""

import dataclasses
import errno
import logging
import signal
import sys
from typing import Literal

import pytest

from moelib.core.errors import UsageError, UserError
from moelib.runtime.command_line import describe_flags, flag, no_arguments, parse_flags, run_command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    module: str | None = flag(None, "Module.", short="m")
    set: tuple[str, ...] = flag((), "Fields.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(Shared):
    count: int = flag(3, "Number of items.", lower_bound=1)
    rate: float | None = flag(None, "Items per second.")
    backend: Literal["cpu", "gpu"] | None = flag(None, "Platform.")
    names: tuple[str, ...] = flag((), "Names.", split=True)
    verbose: bool = flag(False, "Print more.")
    keep: tuple[str, ...] = flag((), "Names.")


def test_every_kind_of_flag_is_parsed():
    line = "-m M --set=a=1 --set b=2 --count=5 --rate=2 --backend=gpu --names=x,y --verbose z"
    flags, rest = parse_flags(Flags, line.split())
    assert flags == Flags(
        module="M",
        set=("a=1", "b=2"),
        count=5,
        rate=2.0,
        backend="gpu",
        names=("x", "y"),
        verbose=True,
    )
    assert rest == ["z"]
    assert parse_flags(Flags, []) == (Flags(), [])
    assert parse_flags(Flags, ["--names=x,,y,"])[0].names == ("x", "y")


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--modul=x", r"'--modul'.*'--module'"),
        ("--count=0", "count=0"),
        ("--count=1e6", r"--count=1e6: write an integer\.$"),
        ("--rate=x", r"--rate=x: write a number\.$"),
        ("--names=a --names=b,c", r"--names=b,c: it is set twice; .* commas\.$"),
        ("--backend=npu", "backend=npu.*cpu"),
        ("--module", "module"),
    ],
)
def test_a_wrong_flag_is_named(argument, named):
    with pytest.raises(UsageError, match=named):
        parse_flags(Flags, argument.split())


def test_an_unknown_flag_may_be_a_field_of_the_config():
    with pytest.raises(UsageError, match=r"'--lr'; .* If it is a field .* --set=lr=\.\.\. tells"):
        parse_flags(Flags, ["--lr=1"])


def test_an_argument_that_looks_like_a_flag_is_refused():
    with pytest.raises(UsageError, match=r"'count'.*'--count'"):
        no_arguments(["count"], Flags)
    no_arguments([], Flags)


def test_own_flags_are_described_before_inherited_ones():
    infos = {info.name: info for info in describe_flags(Flags)}
    assert list(infos)[-2:] == ["module", "set"]
    assert infos["backend"].kind == "cpu|gpu"
    assert [name for name, info in infos.items() if info.repeatable] == ["keep", "set"]
    assert [name for name, info in infos.items() if info.split] == ["names"]


def _fail(error):
    def run(flags, arguments):
        raise error

    return run


def test_an_error_of_the_user_is_one_line(capsys):
    error = UserError("max_step=0: set it to 1\nor more.")
    assert run_command("moelib train", Flags, _fail(error), []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moelib train: max_step=0: set it to 1 or more. (")
    assert "test_command_line.py" in line
    assert "--traceback" in line


def test_an_error_of_a_file_is_one_line(capsys):
    error = PermissionError(13, "Permission denied", "/runs/a")
    assert run_command("moelib train", Flags, _fail(error), []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moelib train: /runs/a: Permission denied (")
    with pytest.raises(PermissionError):
        run_command("moelib train", Flags, _fail(error), ["--traceback"])
    for error, file in (
        (OSError(errno.ENOSPC, "No space left", "/from", None, "/to"), "/to"),
        (OSError(errno.EFBIG, "File too large"), "A file"),
    ):
        assert run_command("moelib train", Flags, _fail(error), []) == 2
        assert f"moelib train: {file}: {error.strerror} (" in capsys.readouterr().err
    with pytest.raises(OSError, match="socket"):
        run_command("moelib train", Flags, _fail(OSError("socket")), [])


def test_a_traceback_is_shown_on_request_and_for_our_own_errors():
    with pytest.raises(UserError):
        run_command("moelib train", Flags, _fail(UserError("wrong")), ["--traceback"])
    with pytest.raises(ValueError, match="a bug"):
        run_command("moelib train", Flags, _fail(ValueError("a bug")), [])


def test_an_error_is_where_its_cause_is_in_the_code_of_the_user(capsys):
    try:
        line = sys._getframe().f_lineno + 1
        1 / 0  # noqa: B018
    except ZeroDivisionError as cause:
        error = UserError("reward raised ZeroDivisionError; correct it.")
        error.__cause__ = cause
    error.add_note("No batch after step 0.")
    assert run_command("moelib train", Flags, _fail(error), []) == 2
    text = capsys.readouterr().err
    assert "correct it. No batch after step 0. (" in text
    assert f"test_command_line.py:{line}; --traceback" in text


def test_a_usage_error_needs_no_traceback(capsys):
    assert run_command("moelib train", Flags, _fail(UsageError("--count=0")), []) == 2
    assert capsys.readouterr().err == "moelib train: --count=0\n"


def test_a_closed_pipe_is_no_message_but_no_success(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert run_command("moelib config", Flags, _fail(BrokenPipeError()), []) == 128 + signal.SIGPIPE
    sys.stdout.close()


def test_warnings_show_their_level_and_origin(capsys):
    record = logging.makeLogRecord({"name": "moelib.x", "msg": "slow", "levelname": "WARNING"})
    run_command("moelib config", Flags, lambda flags, arguments: None, [])
    logging.lastResort.handle(record)
    assert capsys.readouterr().err == "WARNING:moelib.x:slow\n"


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_shows_the_description_and_every_flag(capsys, asked):
    assert run_command("moelib config", Flags, _fail(ValueError), [asked], "Prints it.") == 0
    text = capsys.readouterr().out
    assert text.startswith("Prints it.\n")
    assert all(f"--{info.name}" in text for info in describe_flags(Flags))
