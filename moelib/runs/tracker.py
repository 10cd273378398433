"""Trackers: services that show the metrics of runs, such as Weights & Biases and MLflow."""

import abc
import contextlib
import importlib.util
import itertools
import logging
import math
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.config_text import text_lines
from moelib.core.config_types import cut
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.runs.folder import RunFolder
from moelib.runs.secret import Secret
from moelib.runtime import storage

logger = logging.getLogger(__name__)
_EVENT = "tracker"  # Event with the name of a tracker and the id of its run there.
_RETRY_SECONDS = 60.0  # Between starts while a service is down.
Status = Literal["finished", "failed", "stopped"]


class Tracker(Configurable):
    """Sends a run to a service. `start`, `write` and `close` run in a thread, and may block."""

    package = ""  # Package that it needs, and extra of moelib that installs it.

    @config_class
    class Config(Configurable.Config):
        run_name: str | None = None  # Name of the run there; None for the name of its folder.
        max_waiting: int = 10_000  # Writes that wait for the service; later ones are dropped.
        close_timeout_seconds: float = 30.0  # Time for the last writes at the end of a run.

    def check(self) -> None:
        """Raises UserError if a package or a setting is missing; called before the first step."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise UserError(
                f"{type(self).__name__} needs {self.package}: pip install 'moelib[{self.package}]'"
            )

    @abc.abstractmethod
    def start(self, config_text: str, run_name: str, resume_id: str | None, folder: str) -> str:
        """Starts a run, or continues the one of `resume_id`; returns the id of the run.

        `config_text` has lines "path: value", without secrets; `folder` is for the tracker's files.
        """

    @abc.abstractmethod
    def write(self, step: int, scalars: Scalars) -> None:
        """Sends metrics, named as in `metrics.jsonl`."""

    @abc.abstractmethod
    def close(self, status: Status) -> None:
        """Sends what is left, and ends the run; it may continue later."""


class TrackerThread:
    """Calls a tracker in a thread, so that no step waits for it and no failure ends the run."""

    def __init__(self, name: str, tracker: Tracker, config_text: str, folder: RunFolder) -> None:
        """Starts or continues the run of a folder. Raises UserError as `Tracker.check` does."""
        tracker.check()
        self._name, self._tracker, self._folder = name, tracker, folder
        self._config_text, self._started = config_text, False
        self._num_failures = self._num_dropped = 0
        self._waiting: queue.Queue[Any] = queue.Queue(tracker.config.max_waiting)
        self._status: Status = "failed"
        self._closing, self._deadline = threading.Event(), math.inf
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: Scalars) -> None:
        """Sends metrics later; drops them if too many wait, which is logged once."""
        try:
            self._waiting.put_nowait((step, scalars))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.error(
                    "Tracker %s is slow: metrics are dropped from step %d on.", self._name, step
                )

    def close(self, status: Status) -> None:
        """Ends the run within `close_timeout_seconds`; writes that are not sent are an error."""
        timeout = self._tracker.config.close_timeout_seconds
        self._status, self._deadline = status, time.monotonic() + timeout
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        unsent = self._num_dropped + sum(1 for x in list(self._waiting.queue) if x)
        if self._thread.is_alive() or unsent:
            logger.error(
                "Tracker %s: the run is not closed there, or incomplete: %d writes were not sent; "
                "metrics.jsonl has all.",
                *(self._name, unsent),
            )

    def _run(self) -> None:
        while not self._started:
            with self._failures_logged():
                self._start()
            if not self._started and self._closing.wait(_RETRY_SECONDS):
                return
        while (item := self._waiting.get()) is not None and time.monotonic() < self._deadline:
            with self._failures_logged():
                self._tracker.write(*item)
        if time.monotonic() < self._deadline:
            with self._failures_logged():
                self._tracker.close(self._status)

    def _start(self) -> None:
        ids = {x.get("name"): x.get("id") for x in self._folder.events() if x["event"] == _EVENT}
        name = self._tracker.config.run_name or os.path.basename(self._folder.path)
        resume_id = ids.get(self._name)
        run_id = self._tracker.start(self._config_text, name, resume_id, self._folder.path)
        self._started = True
        if run_id != resume_id:
            self._folder.log(_EVENT, name=self._name, id=run_id)

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Logs the first failure, and the end of a series of them."""
        try:
            yield
        except Exception as error:  # Of a library and its server, for which no run may end.
            self._num_failures += 1
            if self._num_failures == 1:
                text = cut(" ".join(str(error).split()), 500)
                logger.error(
                    "NO METRICS in tracker %s: %s: %s. Training continues.",
                    *(self._name, type(error).__name__, text),
                )
            return
        if self._num_failures:
            logger.error(
                "Tracker %s works again, after %d failures.", self._name, self._num_failures
            )
            self._num_failures = 0


class WandbTracker(Tracker):
    """Weights & Biases. A run that continues adds only the steps that it does not have there."""

    package = "wandb"

    @config_class
    class Config(Tracker.Config):
        project: str = "moelib"  # Project of the run.
        entity: str | None = None  # Team or user; None for the default of the key.
        # "offline" writes files into wandb/ of the run's folder, for `wandb sync`.
        mode: Literal["online", "offline"] = "online"
        base_url: str | None = None  # Address of the server; None for WANDB_BASE_URL or theirs.
        api_key: Secret | None = None  # env:NAME or file:PATH; None for that of `wandb login`.

    def check(self) -> None:
        """Raises UserError if the package or the key is missing."""
        super().check()
        cfg = self.config
        if cfg.api_key is not None:
            cfg.api_key.value()
        elif cfg.mode == "online":
            import wandb

            if not wandb.login(host=cfg.base_url, prompt=False, verify=False):
                raise UserError(
                    "api_key=None: there is no key of Weights & Biases; set it to "
                    "env:WANDB_API_KEY, run `wandb login`, or set mode=offline."
                )

    def start(self, config_text: str, run_name: str, resume_id: str | None, folder: str) -> str:
        """Starts a run. Its config are the lines of the text, as strings."""
        import wandb

        cfg = self.config
        settings: dict[str, Any] = {} if cfg.base_url is None else {"base_url": cfg.base_url}
        if cfg.api_key is not None:
            settings["api_key"] = cfg.api_key.value()
        self._run = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            mode=cfg.mode,
            name=run_name,
            id=resume_id,
            resume="allow",
            dir=tempfile.mkdtemp() if storage.is_remote(folder) else folder,
            config=text_lines(config_text),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # Its address may hold a password.
                disable_code=True,
                init_timeout=cfg.close_timeout_seconds,  # The end of a process waits for both.
                finish_timeout=cfg.close_timeout_seconds,
                **settings,
            ),
        )
        return self._run.id

    def write(self, step: int, scalars: Scalars) -> None:
        """Sends metrics; of a step that W&B has, only the last one's, with the step after it."""
        if step >= self._run.step - 1:  # Steps never go back there.
            self._run.log(dict(scalars), step=max(step, self._run.step))

    def close(self, status: Status) -> None:
        """Ends the run; one that was stopped is "preempted"."""
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(status != "finished"))


class MlflowTracker(Tracker):
    """MLflow, with the credentials of its variables, such as MLFLOW_TRACKING_TOKEN."""

    package = "mlflow"
    _id: str | None = None
    # Last steps of metrics when the run continued, by name; None in a new run.
    _last_steps: dict[str, int] | None = None

    @config_class
    class Config(Tracker.Config):
        tracking_uri: Required[str] = REQUIRED  # Address of the server, as MLFLOW_TRACKING_URI.
        experiment: str = "moelib"  # Name of the experiment, which is created if there is none.

    def start(self, config_text: str, run_name: str, resume_id: str | None, folder: str) -> str:
        """Starts a run. Its parameters are the lines of the config; MLflow lets none change."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(self.config.tracking_uri)
        if resume_id := resume_id or self._id:  # Of an earlier start, or of one that failed late.
            self._client.update_run(resume_id, status="RUNNING")
            self._id, self._last_steps = resume_id, {}
            return resume_id
        name = self.config.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run_name).info.run_id
        values = text_lines(config_text).items()
        params = [Param(_mlflow_name(path), text[:6000]) for path, text in values]
        for some in itertools.batched(params, 100):  # The limits of MLflow.
            self._client.log_batch(self._id, params=some)
        return self._id

    def write(self, step: int, scalars: Scalars) -> None:
        """Sends metrics, unless the run that continues has those of the step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(key), x, now, step) for key, x in scalars.items()]
        if metrics and step > self._last_step(metrics[0].key):
            for some in itertools.batched(metrics, 1000):
                self._client.log_batch(self._id, metrics=some)

    def _last_step(self, name: str) -> int:
        """Returns the last step of a metric at the start of this run; -1 if there is none."""
        if self._last_steps is None:
            return -1
        if name not in self._last_steps:
            history = self._client.get_metric_history(self._id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return self._last_steps[name]

    def close(self, status: Status) -> None:
        """Ends the run as FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self._id, "KILLED" if status == "stopped" else status.upper())


def _mlflow_name(name: str) -> str:
    """Returns a name without the characters that MLflow refuses: a[0]['b'] becomes a.0.b."""
    name = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", name)
    return re.sub(r"[^\w\-. :/]", "_", name)
