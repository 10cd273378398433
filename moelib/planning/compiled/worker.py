"""The process that compiles one step: `python -m moelib.planning.compiled.worker REQUEST RESULT`.

`in_subprocess` starts it. REQUEST is a JSON file of the arguments of `plan_step`, the config as
text. Each completed stage is a line of JSON on stdout, and RESULT becomes one object: `report`, or
`failure` if the step cannot be planned. Any other error ends the process.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time


def main(request_path: str, result_path: str) -> None:
    """Compiles what is asked for, and writes what comes of it."""
    begin = time.perf_counter()
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device is used, and none is to be taken.
    request = json.loads(pathlib.Path(request_path).read_text(encoding="utf-8"))
    from moelib.core import config_parse
    from moelib.planning.compiled.compile_step import plan_step
    from moelib.planning.hardware.topologies import OutOfMemoryError, PlanError, topology

    def tell(stage: str, seconds: float, said: str) -> None:
        print(json.dumps({"stage": stage, "seconds": seconds, "said": said}), flush=True)

    try:
        where = topology(request.pop("topology"))
        cfg = config_parse.parse(request.pop("config"))
        tell("start", time.perf_counter() - begin, f"{len(where.devices)} devices described")
        report = plan_step(cfg, where, on_stage=tell, **request)
        result = {"report": json.loads(report.to_json())}
    except PlanError as error:
        full = isinstance(error, OutOfMemoryError)
        result = {"failure": str(error), "out_of_memory": full}
    pathlib.Path(result_path).write_text(json.dumps(result), encoding="utf-8")


def end_with_parent() -> None:
    """Ends this group of processes as soon as the parent, which holds our stdin open, has ended."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    if os.getpgrp() == os.getpid():  # Started by `apart`, not by hand.
        end_with_parent()
    main(*sys.argv[1:])
