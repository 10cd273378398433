"""A run in one or more processes: `python -m benchmarks.processes`.

Each job of N processes with D devices each trains a small Mixture-of-Experts model, and is started
again from its checkpoint. The table has the seconds from the start to the end of the first step, of
a step (median), and of the restore, and the milliseconds per GB of state that a step waits for a
durable and a local checkpoint.
"""

import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from moelib.launch import DeviceFlags
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.table import Table, print_table

_JOBS = ((1, 4), (2, 2), (1, 8), (2, 4), (4, 2))  # Processes, and devices of each.
_SAVE_EVERY, _MAX_STEP = 10, 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    hidden_dim: int = flag(1024, "Hidden size of the 48 experts.", lower_bound=1)
    folder: str | None = flag(None, "Folder of a run of which this is a process.")


def _config(flags: Flags) -> Any:
    from moelib.launch import load_config

    sets = ["learner.optimizer.args[1].learning_rate.warmup_steps=2"]
    sets += [f"model.decoder.block[0].feed_forward.hidden_dim={flags.hidden_dim}"]
    sets += [f"checkpointer.save_policy.n={_SAVE_EVERY}", "log_every_n_steps=1"]
    sets += ["mesh_shape=fsdp=-1,expert=2", f"checkpointer.local_dir={flags.folder}/local"]
    sets += [f"checkpointer.local_every_n_steps={_SAVE_EVERY // 2}", f"dir={flags.folder}"]
    cfg = load_config("experiments.flame_moe", "flame-moe-tiny", max_step=_MAX_STEP, sets=sets)
    from moelib.data.batches.synthetic import SyntheticInput

    text = SyntheticInput.default_config().set(global_batch_size=16, seq_len=64, vocab_size=512)
    return cfg.set(input=text, evalers={})


def _timed(seconds: list[float], function: Any) -> Any:
    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    return timed


def _run_process(flags: Flags) -> None:
    """Runs one process of a job; process 0 prints what it has measured as JSON."""
    flags.set_up()
    import jax

    from moelib.core import tree

    trainer = _config(flags).instantiate(parent=None)
    saver = trainer.checkpointer
    found: dict[str, list[float]] = {"save": [], "save_locally": [], "restore": []}
    for name, seconds in found.items():
        setattr(saver, name, _timed(seconds, getattr(saver, name)))
    trainer.run()
    if jax.process_index() == 0:
        size = tree.count_bytes(trainer.trainer_state_specs)
        print(json.dumps({"bytes": size, "step": trainer.step, **found}))


def _start(folder: str, num_processes: int, num_devices: int, hidden_dim: int) -> dict[str, Any]:
    """Runs a job to its end, and returns what its process 0 has measured."""
    command = [sys.executable, "-m", "benchmarks.processes", "--jax_backend=cpu"]
    command += [f"--num_cpu_devices={num_devices}", f"--folder={folder}"]
    command += [f"--hidden_dim={hidden_dim}"]
    jobs = [command]
    if num_processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command += [f"--distributed_coordinator={address}", f"--num_processes={num_processes}"]
        jobs = [[*command, f"--process_id={index}"] for index in range(num_processes)]
    begin = time.time()
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in jobs]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{num_processes} processes ended with an error; see above.")
    return {"begin": begin, **json.loads(outputs[0].splitlines()[-1])}


def measure_job(folder: str, num_processes: int, num_devices: int, hidden_dim: int) -> list[float]:
    """Returns the figures of a job, which are the columns of the table after the first."""
    job = (folder, num_processes, num_devices, hidden_dim)
    first, again = _start(*job), _start(*job)
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    size = first["bytes"] / 1e9
    blocked = [1e3 * statistics.median(first[name]) / size for name in ("save", "save_locally")]
    step = statistics.median(line["step_seconds"] for line in lines[2:])
    return [lines[0]["time"] - first["begin"], 1e3 * step, *blocked, again["restore"][0], size]


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the table of all jobs, or runs one process of one."""
    no_arguments(arguments, Flags)
    if flags.folder is not None:
        _run_process(flags)
        return
    rows = []
    for num_processes, num_devices in _JOBS:
        folder = tempfile.mkdtemp(prefix="processes-")
        figures = measure_job(folder, num_processes, num_devices, flags.hidden_dim)
        rows.append((f"{num_processes} x {num_devices}", *(f"{x:.3g}" for x in figures)))
        shutil.rmtree(folder)
    columns = ("first step, s>", "step, ms>", "save, ms/GB>", "local save, ms/GB>", "restore, s>")
    print_table(Table("", ("processes x devices", *columns, "state, GB>"), rows))


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.processes", Flags, run, sys.argv[1:], __doc__ or ""))
