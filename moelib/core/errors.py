"""The base class of errors in a user's input, which commands show as one line."""


class UserError(ValueError):
    """A value, flag or file of the user cannot be used.

    The message names the field and its value, then what to set instead. Commands print it without
    a traceback (`--traceback` shows it). An error that is also another Python error derives from
    both: `class UnknownFieldError(UserError, AttributeError)`.
    """


class UsageError(UserError):
    """A command line that cannot be carried out."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder of the user exists and would be overwritten."""


def check_lists(**arguments: object) -> None:
    """Raises UserError if an argument that holds several texts is one text."""
    for name, given in arguments.items():
        if isinstance(given, str):
            raise UserError(f"{name}={given!r} is one text; set it to a list of texts.")
