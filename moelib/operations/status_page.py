"""The status page: a read-only page that shows the runs below a folder, from their files alone.

It has no authentication, and is therefore served to this machine only, unless a host is given.
Requests name a run and a file, which are looked up among those that may be shown: no path of a
request is opened.
"""

import contextlib
import functools
import importlib.resources
import json
import logging
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from moelib.checkpoint.contents import list_checkpoints
from moelib.operations.runs import VALIDATION, describe_run, find_runs, runs_table, seconds_left
from moelib.runs.curves import RunMetrics
from moelib.runs.folder import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, SAMPLE, RunFolder
from moelib.runs.metrics_file import MetricsReader
from moelib.runtime import storage
from moelib.runtime.http_server import Handler, Server, page_policy
from moelib.runtime.progress import format_seconds
from moelib.train.report import EXPERT_HEALTH

logger = logging.getLogger(__name__)

# Files of a run that are shown; logs are those of `moelib launch`.
_FILES = re.compile(
    rf"{re.escape(CONFIG_FILE)}|{METRICS_FILE}|{EVENTS_FILE}"
    r"|process_\d+\.log|(?:job|processes)-\d+\.log"
)
_PER_LAYER = "per layer"
# (title, unit, regex of metrics) of the charts; a chart without metrics is not shown.
_CHARTS = (
    ("Loss", "nats per token", rf"mean_loss|{VALIDATION}"),
    ("Learning rate", "", r"learning_rate(?:/rule\d+)?"),
    ("Gradient norm", "", "gradient_norm"),
    ("Throughput", "per second, all devices", "(?:tokens|examples)_per_second"),
    ("MFU and goodput", "share", "mfu|goodput"),
    ("Time", "share of a log interval", r"time/\w+"),
    ("Lost time", "seconds since the first start", r"time_lost/\w+"),
    *((title, _PER_LAYER, rf".*[^/]/{name}(?:/\d+)?") for name, title, _ in EXPERT_HEALTH),
)
# Charts whose first steps would leave no height to the others: their values set no range.
_FALLING = ("Loss", "Gradient norm")
_WORDS = {
    "mean_loss": "training",
    "mfu": "MFU",
    "tokens_per_second": "tokens",
    "examples_per_second": "examples",
}
# (title, regex of a field) of the lines of the config that are shown.
_SETTINGS = (
    ("batch, sequences", r"input\.global_batch_size"),
    ("sequence, tokens", r"input\.seq_len"),
    ("data", r"input\.source\.path"),
    ("learning rate", r"learner\..*\b(?:peak_lr|learning_rate)"),
    ("model width", r"model\.dim"),
    ("layers", r"model\.decoder\.num_layers"),
    ("experts", r"model\.decoder\..*\bnum_experts"),
    ("experts per token", r"model\.decoder\..*\bnum_experts_per_token"),
    ("dtype", r"train_dtype"),
    ("mesh", r"mesh_shape"),
)
_NAMES = "|".join([*(names for _, _, names in _CHARTS), "step_seconds", "device_memory_gb"])
_TILES = (  # (title, metric, format)
    ("loss", "mean_loss", "{:.4f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("examples/s", "examples_per_second", "{:,.0f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("goodput", "goodput", "{:.1%}"),
    ("learning rate", "learning_rate", "{:.3g}"),
    ("s/step", "step_seconds", "{:.3g}"),
    ("device memory, GB", "device_memory_gb", "{:.1f}"),
)
_SAMPLE_COLUMNS = ("step", "prompt", "text", "reward")
_SECONDS_PER_READ = 0.1  # Of a request, which shares the interpreter with training.
_MAX_VIEWS = 8  # Runs whose curves are in memory.
_NUM_EVENTS, _NUM_SAMPLES = 30, 30


class StatusServer(Server):
    """Serves the page of a folder of runs, or of one run, from threads of this process."""

    def __init__(self, folder: str, port: int, host: str | None) -> None:
        """Binds the port. Arguments are those of `status_page`."""
        self.folder = folder
        self._views: dict[str, RunMetrics] = {}
        self._listed: dict[str, RunMetrics] = {}
        self._lock, self._list_lock = threading.Lock(), threading.Lock()
        super().__init__("the status page", _Handler, port, host)

    def runs(self) -> dict[str, str]:
        """Returns {name: folder} of the runs; the folder itself if there is none yet.

        A run whose files are links, maybe out of the folder, is not shown.
        """
        found = list(find_runs(self.folder)) or [self.folder]
        files = CONFIG_FILE, METRICS_FILE, EVENTS_FILE
        own = [x for x in found if not any(os.path.islink(os.path.join(x, y)) for y in files)]
        return {os.path.relpath(path, self.folder): path for path in own}

    def overview(self) -> dict[str, Any]:
        """Returns the names of the runs, and a table of them if there are several."""
        runs = self.runs()
        if len(runs) == 1:
            return {"names": list(runs)}
        described, is_complete = [], True
        end = time.monotonic() + _SECONDS_PER_READ
        with self._list_lock:
            for name, path in runs.items():
                reader = MetricsReader(path, only_last=True)
                metrics = self._listed.setdefault(path, RunMetrics(reader, limit=0))
                is_complete &= metrics.update(end - time.monotonic())
                described.append(describe_run(path, metrics, name))
        table = runs_table(described)
        columns = [name.removesuffix(">") for name in table.columns]
        shown = {"columns": columns, "rows": table.rows, "footnotes": table.footnotes}
        return {"names": list(runs), "is_complete": is_complete, **shown}

    def view(self, name: str) -> dict[str, Any] | None:
        """Returns what the page shows of a run, as JSON; None if there is no such run."""
        if (path := self.runs().get(name)) is None:
            return None
        with self._lock:
            if path not in self._views and len(self._views) == _MAX_VIEWS:
                del self._views[next(iter(self._views))]
            metrics = self._views.setdefault(path, RunMetrics(MetricsReader(path), _NAMES))
            return {
                "is_complete": metrics.update(_SECONDS_PER_READ),
                "files": files_of(path),
                **_described(path, metrics, name if name != "." else os.path.basename(path)),
            }


def _described(path: str, metrics: RunMetrics, name: str) -> dict[str, Any]:
    run = describe_run(path, metrics, name)
    tiles = [(title, key, form) for title, key, form in _TILES if metrics.last(key) is not None]
    shown = [(title, form.format(metrics.last(key))) for title, key, form in tiles]
    for key, (last, best, step) in run.validation.items():
        if last is not None:
            shown.append((key, f"{last:.4f}"))
        if best is not None:
            shown.append((f"best, at step {step:,}", f"{best:.4f}"))
    if checkpoints := list_checkpoints(RunFolder(path).checkpoints):
        shown.append(("newest checkpoint", f"{max(checkpoints):,}"))
    seconds = seconds_left(run, metrics)
    all_events = RunFolder(path).events()
    events = [x for x in all_events if x["event"] != SAMPLE][-_NUM_EVENTS:]
    samples = [x for x in all_events if x["event"] == SAMPLE][-_NUM_SAMPLES:]
    columns = [name for name in _SAMPLE_COLUMNS if any(name in x for x in samples)]
    return {
        "name": run.name,
        "state": run.state,
        "notes": [text for text in (run.cause, run.damage) if text],
        "step": run.step,
        "max_step": run.max_step,
        "phase": run.phase,
        "left": "" if seconds is None else f"about {format_seconds(seconds)} left",
        "changed": _clock(run.changed),
        "tiles": shown,
        "charts": list(_charts(metrics)),
        "settings": _settings(RunFolder(path).file(CONFIG_FILE)),
        "sample_columns": [name.capitalize() for name in columns],
        "samples": [[str(x.get(name, "")) for name in columns] for x in samples[::-1]],
        "events": [[_clock(x.pop("time")), x.pop("event"), _fields(x)] for x in events[::-1]],
    }


def _settings(path: str) -> list[tuple[str, str]]:
    """Returns the titles and values of settings in a config's text."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    found = ((x, re.search(rf"^{field}: (.+)$", text, re.MULTILINE)) for x, field in _SETTINGS)
    return [(title, match[1].strip("'")) for title, match in found if match]


def _charts(metrics: RunMetrics) -> Iterator[dict[str, Any]]:
    for title, unit, pattern in _CHARTS:
        curves = {k: x.points() for k, x in metrics.curves.items() if re.fullmatch(pattern, k)}
        names = sorted((name for name, points in curves.items() if points), key=_in_order)
        shared = set.intersection(*(set(x.split("/")) for x in names)) if len(names) > 1 else set()
        series = []
        for name in names:
            label = "/".join(x for x in name.split("/") if x not in shared) or name
            size = 2 if unit == _PER_LAYER else 4  # Bands of many layers would hide each other.
            points = [[float(f"{x:.7g}") for x in point[:size]] for point in curves[name]]
            label = f"layer {label}" if label.isdigit() else _WORDS.get(label, label)
            if unit != _PER_LAYER:
                label = label.removesuffix("/loss").replace("_", " ")
            series.append({"name": name, "label": label, "points": points})
        if series:
            per_layer = unit == _PER_LAYER
            yield {
                "title": title,
                "unit": unit,
                "per_layer": per_layer,
                "is_falling": title in _FALLING,
                "series": series,
            }


def _in_order(name: str) -> list[Any]:
    """Returns a key by which layer2 comes before layer10."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def _clock(seconds: Any) -> str:
    if not isinstance(seconds, int | float) or not seconds:
        return ""
    with contextlib.suppress(OverflowError, OSError, ValueError):  # Of a damaged line.
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""


def _fields(event: dict[str, Any]) -> str:
    shown = {name: value for name, value in event.items() if "/" not in name}  # Without times.
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def files_of(directory: str) -> list[str]:
    """Returns the names of a run's files that may be shown, which excludes links."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        found = (x.name for x in entries if x.is_file(follow_symlinks=False))
        return sorted(name for name in found if _FILES.fullmatch(name))
    return []


@functools.cache
def _page() -> tuple[bytes, str]:
    """Returns the page and its policy."""
    page = importlib.resources.files("moelib.operations").joinpath("status_page.html").read_bytes()
    return page, page_policy(page)


class _Handler(Handler):
    """Answers GET and HEAD."""

    @property
    def policy(self) -> str:  # pyrefly: ignore[bad-override]
        """The policy of the page."""
        return _page()[1]

    def do_GET(self) -> None:  # noqa: N802
        """Sends the page, JSON or a file."""
        path, _, text = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(text))
        name, file = query.get("run", "."), query.get("name", "")
        if not self.is_own_host():
            self.send_error(403, "The Host header names another site")
        elif path == "/":
            self.send(_page()[0], "text/html; charset=utf-8")
        elif path == "/runs.json":
            self.send(json.dumps(self.server.overview()).encode(), "application/json")
        elif path == "/run.json" and (found := self.server.view(name)) is not None:
            self.send(json.dumps(found).encode(), "application/json")
        elif path == "/file" and file in files_of(folder := self.server.runs().get(name, "")):
            self._send_file(os.path.join(folder, file))
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def _send_file(self, path: str) -> None:
        """Sends a text file up to its present end; it may grow meanwhile."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda path, _: os.open(path, flags)) as file:
            size = os.fstat(file.fileno()).st_size
            self.begin("text/plain; charset=utf-8", **{"Content-Length": str(size)})
            if self.command != "HEAD" and size:
                self.wfile.flush()
                self.connection.sendfile(file, count=size)


@contextlib.contextmanager
def status_page(folder: str, port: int, host: str | None = None) -> Iterator[str]:
    """Serves the status page of a folder during the body, and yields its address.

    Args:
        folder: Folder of a run, or of runs; it may not exist yet.
        port: Port; 0 for any free one.
        host: Address to bind; by default 127.0.0.1. Others are a warning: there is no
            authentication.

    Raises:
        UserError: If the port cannot be bound, or the folder is a URL.
    """
    storage.require_local("the folder of the status page", folder, "see TensorBoard otherwise")
    folder = os.path.abspath(folder)
    server = StatusServer(folder, port, host)
    if not server.is_local:
        logger.warning(
            "%s: the status page has no authentication, so that everyone who reaches this "
            "address can read config, metrics and logs of the runs below %s.",
            *(server.url, folder),
        )
    with server.running() as url:
        yield url
