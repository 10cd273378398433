"""`moelib serve` with several clients: `python -m benchmarks.serve --hf_dir=MODEL`.

The server is a process of its own, and each client a thread that asks for one text after another by
HTTP. Numbers of clients alternate; rates are over the time of a repeat. All texts begin with the
same prompt, so that their tokens visit the same experts.
"""

import concurrent.futures
import dataclasses
import http.client
import json
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence

from moelib.core.errors import UserError
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.table import Table, print_table

PROMPT = "def main("
CLIENTS = (1, 4, 16)
_JSON = {"Content-Type": "application/json"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    hf_dir: str = flag("exported", "Folder of the model.")
    texts: int = flag(4, "Number of texts per client and repeat.", lower_bound=1)
    max_tokens: int = flag(64, "Maximum number of tokens of a text.", lower_bound=1)
    repeats: int = flag(5, "Number of repeats.", lower_bound=1)


def num_tokens(url: str, flags: Flags) -> int:
    """Returns the number of tokens of the texts that one client got."""
    connection, total = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc), 0
    body = {"prompt": PROMPT, "max_tokens": flags.max_tokens, "temperature": 0}
    for _ in range(flags.texts):
        connection.request("POST", "/v1/completions", json.dumps(body), _JSON)
        response = connection.getresponse()
        found = json.loads(response.read())
        if response.status != 200:
            raise UserError(f"{url} answered {response.status}: {found}.")
        total += found["usage"]["completion_tokens"]
    connection.close()
    return total


def rate(url: str, flags: Flags, clients: int) -> float:
    """Returns the tokens per second of this number of clients."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(lambda _: num_tokens(url, flags), range(clients)))
    return total / (time.perf_counter() - begin)


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints a table of the rates."""
    no_arguments(arguments, Flags)
    command = [sys.executable, "-m", "moelib", "serve", f"--hf_dir={flags.hf_dir}", "--port=0"]
    with subprocess.Popen(
        [*command, "--dtype=float32"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().partition(": ")[0]
        if not url:
            raise UserError(f"{' '.join(command[2:])} did not start; see its message.")
        rates: dict[int, list[float]] = {n: [] for n in CLIENTS}
        try:
            for repeat in range(flags.repeats + 1):
                for clients, found in rates.items():
                    measured = rate(url, flags, clients)
                    if repeat:  # The first one compiles.
                        found.append(measured)
        finally:
            server.terminate()
    rows = [(str(n), f"{max(x):,.0f}", f"{statistics.median(x):,.0f}") for n, x in rates.items()]
    print_table(Table("Tokens per second", ("clients>", "best>", "median>"), rows))


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.serve", Flags, run, sys.argv[1:], __doc__ or ""))
