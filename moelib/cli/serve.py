"""`moelib serve`: answers requests of OpenAI's clients with a model, and shows a page to chat.

    moelib serve --trainer_dir=RUN
    moelib serve --hf_dir=MODEL --port=8000 --host=0.0.0.0 --api_key_file=key.txt

The endpoints are /v1/models, /v1/completions and /v1/chat/completions. Only this machine reaches
them, unless --host is set, which requires a key.
"""

import dataclasses
import os
import signal
import threading
from collections.abc import Sequence

from moelib.cli.chat import ChatFlags
from moelib.core.errors import UsageError
from moelib.runtime.command_line import flag, no_arguments
from moelib.runtime.http_server import check_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ChatFlags):
    """Flags of the command."""

    port: int = flag(8000, "Port; 0 for any free one.", lower_bound=0)
    host: str | None = flag(None, "Address to bind; by default 127.0.0.1.")
    api_key_file: str | None = flag(
        None, "File with the key that clients must send; by default MOELIB_API_KEY, if it is set."
    )
    name: str | None = flag(None, "Name of the model in answers; by default that of the folder.")
    max_active: int = flag(16, "Texts that are generated together.", lower_bound=1)
    max_requests: int = flag(
        64, "Texts in progress, active or waiting; more are refused.", lower_bound=1
    )


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Serves until SIGINT or SIGTERM."""
    no_arguments(arguments, Flags)
    key = _key(flags.api_key_file)
    check_address(flags.host, flags.port, key)  # Before the model, which may take minutes.
    model = flags.load()
    chat = flags.chat_format(model, is_required=False)
    from moelib.inference.server import serve

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    name = flags.name or os.path.basename(os.path.abspath(flags.folder))
    numbers = {"max_active": flags.max_active, "max_requests": flags.max_requests}
    with serve(
        model, flags.port, chat=chat, host=flags.host, name=name, api_key=key, **numbers
    ) as url:
        kinds = "completions" if chat is None else "chat and completions"
        print(f"{url}: {name}, {kinds}. Ctrl-C ends.", flush=True)
        stopped.wait()


def _key(path: str | None) -> str | None:
    """Returns the key of clients. Raises UsageError if its file cannot be read."""
    if path is None:
        return os.environ.get("MOELIB_API_KEY")
    try:
        with open(path, encoding="utf-8") as file:
            key = file.read().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--api_key_file {path} cannot be read: {error}.") from error
    if not key:
        raise UsageError(f"--api_key_file {path} is empty; write a key into it.")
    return key
