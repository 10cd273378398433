"""One process of a drill: a run that injects its next fault, and writes down what happens.

    python -m moelib.operations.drill_process FOLDER

FOLDER has `config.txt` and `faults.json`; `done_*` has a name per fault that has happened, and
`drill.jsonl` a line per step of process 0.
"""

import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

from moelib.core.config_text import parse
from moelib.operations import faults
from moelib.operations.faults import Fault
from moelib.runs.folder import RunFolder


class _Drill:
    """The next fault of a run, in one process."""

    def __init__(self, folder: pathlib.Path, process: int) -> None:
        self._folder, self._process = folder, process
        self._faults = [Fault(**x) for x in json.loads((folder / "faults.json").read_text())]
        self._next = sum(1 for _ in folder.glob("done_*"))

    def write(self, **event: Any) -> None:
        """Appends an event, which is on the disk before this process ends."""
        with open(self._folder / "drill.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "process": self._process, **event}) + "\n")

    def fault(self, at: str, step: int = 0) -> str | None:
        """Returns the kind of the fault that happens at a moment, and marks it as done."""
        index = self._next
        if index == len(self._faults) or not self._faults[index].hits(self._process, at, step):
            return None
        self._next += 1
        (self._folder / f"done_{index}").touch()
        if self._faults[index].process == self._process or self._process == 0:
            self.write(fault=self._faults[index].kind, step=step)
        return self._faults[index].kind

    def start(self) -> None:
        """Damages files, in process 0; the other processes wait until it has."""
        at_start = self._next < len(self._faults) and self._faults[self._next].at == faults.START
        if self._process and at_start:
            while not (self._folder / f"done_{self._next}").exists():
                time.sleep(0.05)
            self._next += 1
        elif kind := self.fault(faults.START):
            getattr(faults, kind)(pathlib.Path(RunFolder(self._folder).checkpoints))

    def attach(self, trainer: Any) -> None:
        """Lets the faults happen in a trainer."""
        for method in ("run_step", "restore_checkpoint", "save_checkpoint"):
            own, original = getattr(self, method), getattr(trainer, method)
            setattr(trainer, method, functools.partial(own, trainer, original))
        open_iterator = trainer.input.iterator
        trainer.input.iterator = lambda *args: _Batches(open_iterator(*args), self)

    def run_step(self, trainer: Any, run_step: Any, batch: Any, **options: Any) -> Any:
        """Takes a step of a trainer."""
        if kind := self.fault(faults.STEP, trainer.step + 1):
            getattr(faults, kind)(trainer)
        metrics = run_step(batch, **options)
        if self._process == 0:
            self.write(step=trainer.step)
        return metrics

    def restore_checkpoint(self, trainer: Any, restore: Any, *args: Any) -> int | None:
        """Restores the state of a trainer."""
        del trainer
        if kind := self.fault(faults.RESTORE):
            faults.soon(getattr(faults, kind))
        step = restore(*args)
        if self._process == 0:
            self.write(start=step or 0)
        return step

    def save_checkpoint(self, trainer: Any, save: Any, *args: Any, **options: Any) -> None:
        """Saves the state of a trainer."""
        kind = self.fault(faults.SAVE, trainer.step)
        if kind == faults.full_disk.__name__:
            with faults.full_disk():
                save(*args, **options)
                trainer.checkpointer.wait()
            return
        save(*args, **options)
        if kind:
            getattr(faults, kind)()


class _Batches:
    """The iterator of an input, whose batches may come late or not at all."""

    def __init__(self, batches: Any, drill: _Drill) -> None:
        self._batches, self._drill = batches, drill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        if kind := self._drill.fault(faults.BATCH, self._batches.step + 1):
            getattr(faults, kind)(None)
        return next(self._batches)


def main(folder: str) -> int:
    """Runs the config of a drill, and returns the exit status."""
    from moelib.runtime.distributed import initialize_distributed
    from moelib.tasks.fit import fit

    path = pathlib.Path(folder)
    drill = _Drill(path, int(os.environ.get("JAX_PROCESS_ID", "0")))
    drill.start()
    initialize_distributed()
    config = pathlib.Path(RunFolder(folder).config_file)
    text = config.read_text(encoding="utf-8")
    trainer = parse(text, source=f"{config}:", trusted=True).instantiate(parent=None)
    drill.attach(trainer)
    return 75 if fit(trainer).stopped_by == "SIGTERM" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
