"""The base class of errors in a user's input, which commands show as one line."""

import re


class UserError(ValueError):
    """A value, flag or file of the user cannot be used.

    The message names the field and its value, then what to set instead. Commands print it without
    a traceback (`--traceback` shows it). An error that is also another Python error derives from
    both: `class UnknownFieldError(UserError, AttributeError)`.
    """

    exit_status = 2  # Exit status of a command that ends with the error.


class UsageError(UserError):
    """A command line that cannot be carried out."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder of the user exists and would be overwritten."""


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message, without TensorStore's specs."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].partition(' [tensorstore_spec=')[0][:400]}"


def refuse_single_strings(**values: object) -> None:
    """Checks arguments that are lists of strings, whose characters a string would stand for.

    Raises:
        UserError: If one is a string.
    """
    for name, value in values.items():
        if isinstance(value, str):
            raise UserError(f"{name}={value!r}: pass a list of strings, [{value!r}].")


SECRET_NAME = "(?:[A-Z0-9_]+_KEY|[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD))"  # Names of variables.
_PASSWORDS = (
    re.compile(r"(://[^/\s:@'\"]*:)[^/\s@'\"]+(?=@)"),  # Passwords in URLs.
    re.compile(rf"(\b{SECRET_NAME}['\"]?\s*[=:]\s*[({{\['\"]*)(?!env:|file:)[^\s'\",}}]+"),
)


def masked(text: str) -> str:
    """Returns a text with *** for passwords of URLs and values of variables such as HF_TOKEN."""
    for pattern in _PASSWORDS:
        text = pattern.sub(r"\1***", text)
    return text


def is_full_device(error: BaseException) -> bool:
    """Returns whether XLA says that a device has no memory left, other than a kernel's own."""
    line, _, _ = str(error).strip().partition("\n")
    of_kernel = re.search(r"vmem|smem|sflag|shared memory", line, re.IGNORECASE)
    return "RESOURCE_EXHAUSTED" in line and of_kernel is None
