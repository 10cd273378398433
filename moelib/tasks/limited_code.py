"""A process that runs code with limits.

It reads JSON, {"code", "seconds", "megabytes", "file_size", "ended"}, of which the last is the exit
status after the last line. It imports nothing of moelib, so that it starts fast.
"""

import contextlib
import json
import os
import resource
import sys


def main() -> None:
    """Sets the limits, for the processes of the code too, and runs it."""
    request = json.loads(sys.stdin.read())
    num_bytes, size = request["megabytes"] << 20, request["file_size"]
    seconds = max(1, round(request["seconds"]))
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, num_bytes),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(OSError, AttributeError):  # The kernel may forbid it.
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)  # No network.
    exec(compile(request["code"], "<completion>", "exec"), {"__name__": "__main__"})
    sys.exit(request["ended"])


if __name__ == "__main__":
    main()
