"""Kills at random moments: `python -m benchmarks.kills [KIND ...]`.

A case starts a command, kills one of its processes by SIGKILL in a phase of it, and leaves the
folder to the next case, which starts the command again. The files of a command that ends are
compared with those of one that was never killed: a run's metrics and the checksums of its last
state, or all bytes of a token store.
"""

import dataclasses
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from moelib.checkpoint.contents import list_checkpoints, list_unfinished
from moelib.core.errors import UsageError
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.command_line import flag, run_command
from moelib.runtime.table import Table, print_table

_INTERVAL, _MAX_STEP, _EVALUATE_EVERY = 10, 300, 30  # Steps.
_HANG_SECONDS = 300.0


def named_trainer_configs() -> dict[str, Callable[[], Any]]:
    """Returns the config of the runs: a small model of a synthetic language."""
    from moelib.checkpoint.checkpointer import Checkpointer
    from moelib.core.config import config_for_function
    from moelib.data.batches.lm_input import InputMode
    from moelib.data.batches.synthetic import SyntheticInput
    from moelib.huggingface.families import read_model
    from moelib.learner.optimizers import adamw_optimizer
    from moelib.train.evaler import SpmdEvaler
    from moelib.train.trainer import SpmdTrainer

    def tiny() -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
        text = SyntheticInput.default_config().set(global_batch_size=4, seq_len=16, vocab_size=32)
        some = text.clone(mode=InputMode.EVALUATE, max_batches=100)
        cfg = SpmdTrainer.default_config().set(
            model=read_model({"model_type": "llama", **sizes, **layers}, "config.json")[1],
            input=text,
            max_step=_MAX_STEP,
            log_every_n_steps=1,
            evalers={"all": SpmdEvaler.default_config().set(input=some)},
        )
        cfg.learner.optimizer = config_for_function(adamw_optimizer).set(learning_rate=0.01)
        cfg.evalers["all"].eval_policy.set(n=_EVALUATE_EVERY)
        cfg.summary_writer.formats = ["json_lines"]
        cfg.checkpointer = Checkpointer.default_config().set(keep_last_n=2)
        cfg.checkpointer.save_policy.set(n=_INTERVAL)
        return cfg

    return {"tiny": tiny}


# -- State of a run's folder ---------------------------------------------------------------------


def _metrics(folder: str) -> list[tuple[int, Any]]:
    """Returns (step, loss) of the complete lines of a run's metrics, oldest first."""
    lines = read_metrics(folder, ["loss"])
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def _step(folder: str) -> int:
    return max((step for step, _ in _metrics(folder)), default=0)


def _saved(folder: str) -> tuple[int, list[str]]:
    """Returns the step of the newest checkpoint, or 0, and the folders of incomplete ones."""
    path = os.path.join(folder, "checkpoints")
    return max(list_checkpoints(path), default=0), list_unfinished(path)


def _has_begun(folder: str, since: float) -> bool:
    lock = os.path.join(folder, ".lock")
    return os.path.exists(lock) and os.path.getmtime(lock) > since


def _is_deleting(folder: str) -> bool:
    newest, incomplete = _saved(folder)
    return any(int(path[-8:]) < newest for path in incomplete)


# {phase: (whether it has begun, of the folder, the step and the time of the command's start; and
# the longest time from then to the kill, in seconds)}
_PHASES: dict[str, tuple[Callable[[str, int, float], bool], float]] = {
    "any": (lambda folder, step, since: True, 12.0),
    "restore": (lambda folder, step, since: _has_begun(folder, since), 1.0),
    "steps": (lambda folder, step, since: _step(folder) > step, 1.0),
    "evaluation": (
        lambda folder, step, since: _step(folder) % _EVALUATE_EVERY == 0 < _step(folder),
        0.2,
    ),
    "save": (
        lambda folder, step, since: _has_begun(folder, since) and bool(_saved(folder)[1]),
        0.2,
    ),
    "deletion": (
        lambda folder, step, since: _has_begun(folder, since) and _is_deleting(folder),
        0.002,
    ),
}


# -- Commands ------------------------------------------------------------------------------------


def _train(folder: str, num_processes: int) -> list[list[str]]:
    """Returns the command line of each process of a run."""
    command = ["moelib.launch", "--module=benchmarks.kills", "--config=tiny", "--jax_backend=cpu"]
    command += [f"--trainer_dir={folder}", "--num_cpu_devices=1"]
    if num_processes == 1:
        return [command]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"--distributed_coordinator=127.0.0.1:{free.getsockname()[1]}"
    job = [*command, address, f"--num_processes={num_processes}"]
    return [[*job, f"--process_id={index}"] for index in range(num_processes)]


def _prepare(folder: str) -> list[list[str]]:
    corpus = os.path.join(os.path.dirname(folder), "corpus.jsonl")
    rng = random.Random(0)
    if not os.path.exists(corpus):
        with open(corpus, "w", encoding="utf-8") as file:
            for _ in range(30000):
                text = "".join(rng.choices("abcdefgh ", k=rng.randrange(300)))
                file.write(json.dumps({"text": text}) + "\n")
    store = os.path.join(folder, "store")
    command = ["moelib", "prepare", f"--source={corpus}", f"--output={store}", "--train_bpe=500"]
    return [[*command, "--num_processes=2"]]


# {kind: (command lines by folder, phases, share of the cases)}. Of two processes, none is killed
# before both have started: the other would wait for it for JAX's 300 s.
_KINDS: dict[str, tuple[Callable[[str], list[list[str]]], Sequence[str], float]] = {
    "one_process": (lambda folder: _train(folder, 1), tuple(_PHASES), 0.54),
    "two_processes": (lambda folder: _train(folder, 2), tuple(_PHASES)[1:], 0.3),
    "prepare": (_prepare, ("any",), 0.16),
}


def run_and_kill(kind: str, folder: str, phase: str | None, rng: random.Random) -> float | None:
    """Runs a command, and kills one of its processes in a phase.

    Returns:
        The seconds until the other processes had ended, or None if the command was not killed.

    Raises:
        RuntimeError: If processes do not end, or fail although none is killed.
    """
    os.makedirs(folder, exist_ok=True)
    step, since = _step(folder), time.time()
    with open(f"{folder}.log", "ab") as log:
        processes = [
            subprocess.Popen([sys.executable, "-m", *each], stdout=log, stderr=log, process_group=0)
            for each in _KINDS[kind][0](folder)
        ]
    running = lambda: all(process.poll() is None for process in processes)
    begun, seconds = _PHASES[phase or "any"]
    while running() and (phase is None or not begun(folder, step, since)):
        time.sleep(0.002)
    until = time.monotonic() + rng.random() * seconds
    while running() and time.monotonic() < until:
        time.sleep(0.002)
    if is_killed := running():
        rng.choice(processes).kill()
    begin = time.monotonic()
    while any(process.poll() is None or _has_workers(process.pid) for process in processes):
        time.sleep(0.01)
        if time.monotonic() > begin + _HANG_SECONDS:
            raise RuntimeError(f"{kind}: not all processes have ended; see {folder}.log")
    if not is_killed and any(process.returncode for process in processes):
        raise RuntimeError(f"{kind}: a command failed that was not killed; see {folder}.log")
    return time.monotonic() - begin if is_killed else None


def _has_workers(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _result(folder: str) -> dict[str, Any]:
    """Returns what a command has written, which does not depend on kills."""
    found: dict[str, Any] = {"metrics": _metrics(folder)}
    for path, _, names in os.walk(folder):
        at = os.path.relpath(path, folder)
        for name in names if not at.startswith("checkpoints") else ():
            with open(os.path.join(path, name), "rb") as file:
                found[os.path.join(at, name)] = file.read() if at == "store" else None
    if os.path.isdir(path := os.path.join(folder, "checkpoints")):
        found["checkpoints"] = sorted(os.listdir(path))
        with open(f"{path}/step_{_MAX_STEP:08d}/record/metadata", encoding="utf-8") as file:
            found["checksums"] = json.load(file)["checksums"]
    return found


def kill_repeatedly(kind: str, num_cases: int, seed: int, work: str) -> list[tuple[str, ...]]:
    """Returns the rows of a kind's phases.

    Raises:
        RuntimeError: If the files of a command that was killed differ from the expected ones.
    """
    expected, folder = os.path.join(work, "expected"), os.path.join(work, "killed")
    run_and_kill(kind, expected, None, random.Random())
    rng, phases = random.Random(f"{kind} {seed}"), _KINDS[kind][1]
    cases: dict[str, list[tuple[int, float]]] = {phase: [] for phase in phases}
    num_killed = num_compared = 0
    while True:
        phase = phases[num_killed % len(phases)] if num_killed < num_cases else None
        seconds = run_and_kill(kind, folder, phase, rng)
        if phase is not None and seconds is not None:
            cases[phase].append((max(_step(folder) - _saved(folder)[0], 0), seconds))
            num_killed += 1
            continue
        found, wanted = _result(folder), _result(expected)
        if wrong := [name for name in found | wanted if found.get(name) != wanted.get(name)]:
            raise RuntimeError(f"{folder}: {wrong[0]} differs from that of a command never killed.")
        shutil.rmtree(folder)
        num_compared += 1
        if phase is None:
            break
    rows: list[tuple[str, ...]] = []
    for phase, results in cases.items():
        lost, seconds = zip(*results, strict=True) if results else ((0,), (0.0,))
        more = sum(each > _INTERVAL for each in lost)
        values = map(str, (len(results), max(lost), more, f"{max(seconds):.1f}", num_compared))
        rows.append((kind, phase, *values))
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cases: int = flag(100, "Number of kills.", lower_bound=1)
    seed: int = flag(0, "Seed of the random moments.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the table of the kinds that the arguments name; of all, if there are none."""
    if unknown := [each for each in arguments if each not in _KINDS]:
        raise UsageError(f"kind {unknown[0]!r}: name some of {', '.join(_KINDS)}.")
    kinds = arguments or list(_KINDS)
    total = sum(_KINDS[kind][2] for kind in kinds)
    rows = []
    for kind in kinds:
        num_cases = round(flags.cases * _KINDS[kind][2] / total)
        work = tempfile.mkdtemp(prefix="kills-")  # Kept if a case fails.
        rows += kill_repeatedly(kind, num_cases, flags.seed, work)
        shutil.rmtree(work)
    columns = ("kind", "phase", "kills", "steps lost", "over an interval", "s to end", "compared")
    print_table(Table("kills", columns, rows))


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.kills", Flags, run, sys.argv[1:], __doc__ or ""))
