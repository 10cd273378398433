"""The process that compiles one step: `python -m moelib.planning.compiled.worker REQUEST RESULT`.

`in_subprocess` starts it. REQUEST is a JSON file of the arguments of `compile_step`, with the
config as text. Each completed stage is a line of JSON on stdout. RESULT becomes a JSON object with
`report`, or with `failure` if the step cannot be planned. Any other error ends the process.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time


def main(request_path: str, result_path: str) -> None:
    """Compiles the step of a request, and writes the result."""
    begin = time.perf_counter()
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device is used.
    request = json.loads(pathlib.Path(request_path).read_text(encoding="utf-8"))
    from moelib.core import config_parse
    from moelib.core.errors import UserError
    from moelib.planning.compiled.compile_step import compile_step
    from moelib.planning.hardware.topologies import OutOfMemoryError, topology

    def tell(stage: str, seconds: float, detail: str) -> None:
        print(json.dumps({"stage": stage, "seconds": seconds, "detail": detail}), flush=True)

    try:
        devices = topology(request.pop("topology"))
        cfg = config_parse.parse(request.pop("config"), trusted=True)
        tell("start", time.perf_counter() - begin, f"{len(devices.devices)} devices described")
        report = compile_step(cfg, devices, on_stage=tell, **request)
        result = {"report": report.to_json()}
    except UserError as error:
        out_of_memory = isinstance(error, OutOfMemoryError)
        result = {"failure": str(error), "out_of_memory": out_of_memory}
    pathlib.Path(result_path).write_text(json.dumps(result), encoding="utf-8")


def end_with_parent() -> None:
    """Ends this group of processes when the parent, which holds stdin open, has ended."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    if os.getpgrp() == os.getpid():  # Started by `in_subprocess`, not by hand.
        end_with_parent()
    main(*sys.argv[1:])
