"""The process that compiles one step: `python -m moelib.planning.compiled.worker FOLDER`.

`in_subprocess` starts it. FOLDER/request is a JSON object of a time limit and the arguments of
`compile_step`, with the config as text. Each completed stage is a line on stdout. FOLDER/result
becomes a JSON object with `report`, or with `failure` if the step cannot be planned. Any other
error ends the process.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time


def end_with_parent() -> None:
    """Ends this process when its parent, which holds stdin open, has ended."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(folder: str) -> None:
    """Compiles the step of a request, and writes the result."""
    begin = time.perf_counter()
    request = json.loads(pathlib.Path(folder, "request").read_text(encoding="utf-8"))
    # The signal ends the process, also in the compiler, which runs no Python.
    signal.setitimer(signal.ITIMER_REAL, request.pop("timeout_seconds") or 0)
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device is used.
    from moelib.core import config_text
    from moelib.core.errors import UserError
    from moelib.planning.compiled.compile_step import compile_step
    from moelib.planning.hardware.topologies import OutOfMemoryError, topology

    def tell(stage: str, seconds: float, detail: str) -> None:
        print(f"{stage} in {seconds:.1f} s ({detail})", flush=True)

    try:
        devices = topology(request.pop("topology"))
        cfg = config_text.parse(request.pop("config"), trusted=True)
        tell("start", time.perf_counter() - begin, f"{len(devices.devices)} devices described")
        report = compile_step(cfg, devices, on_stage=tell, **request)
        result = {"report": report.to_json()}
    except UserError as error:
        out_of_memory = isinstance(error, OutOfMemoryError)
        result = {"failure": str(error), "out_of_memory": out_of_memory}
    pathlib.Path(folder, "result").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
