"""Goodput: the share of a run's time, over all of its starts, in which it took steps that it kept.

A record holds `time`, `step` and, cumulative since the first start of the run, the seconds
`productive_seconds` and `time_lost/<category>`. Lines of `metrics.jsonl` are records, and so are
the events "restored", "compiled" and "end" in the log of the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moelib.core.metrics import Scalars
from moelib.runtime.progress import format_seconds

PRODUCTIVE = "productive_seconds"
# {category of the library ml-goodput-measurement: title}; compilation, and the first step with it,
# are no part of start-up here.
CATEGORIES = {
    "program_startup": "startup",
    "compilation": "compilation",
    "data_loading": "input",
    "checkpoint_save": "save",
    "checkpoint_restore": "restore",
    "evaluation": "evaluation",
    "wasted_progress": "steps taken again",
    "infrastructure_recovery": "waiting",
}
_LOST = [f"time_lost/{category}" for category in CATEGORIES]
STARTUP, COMPILATION, DATA, SAVE, RESTORE, EVALUATION, WASTED, WAITING = _LOST
NAMES = (PRODUCTIVE, *_LOST)
_Records = Sequence[Mapping[str, Any]]


def goodput(events: _Records, lines: _Records = ()) -> Scalars:
    """Returns `goodput` (0 to 1) and the seconds of a run up to its newest record.

    The seconds are `productive_seconds` and `time_lost/<category>`; a run without a record has none
    of them. `events` is the log of the run, `lines` those of its metrics, newer while it runs.
    """
    records = [x for x in (*events, *lines) if PRODUCTIVE in x]
    if not records:
        return {}
    newest = max(records, key=_age)
    return with_share({name: newest.get(name) or 0.0 for name in NAMES})


def carried_over(events: _Records, lines: _Records, step: int, now: float) -> Scalars:
    """Returns the seconds of a run up to `now` (since 1970), when it starts again from `step`.

    The time of later steps, of which `lines` still has the metrics, was wasted. The time since the
    last record counts as infrastructure recovery.
    """
    records = sorted((x for x in (*events, *lines) if PRODUCTIVE in x), key=_age)
    spent = dict.fromkeys(NAMES, 0.0) | goodput(records)
    spent.pop("goodput", None)
    at_step = {0: 0.0} | {x["step"]: x[PRODUCTIVE] or 0.0 for x in records}
    steps = sorted(x for x in at_step if not records or x <= records[-1]["step"])
    kept = float(np.interp(step, steps, [at_step[x] for x in steps]))
    spent[WASTED] += max(spent[PRODUCTIVE] - kept, 0.0)
    spent[PRODUCTIVE] = min(spent[PRODUCTIVE], kept)
    first = min((x["time"] for x in events if x["event"] == "start"), default=now)
    spent[WAITING] = max(now - first - (sum(spent.values()) - spent[WAITING]), spent[WAITING])
    return spent


def _age(record: Mapping[str, Any]) -> float:
    """Returns the seconds of a run at a record, which no clock of another host changes."""
    return sum(record.get(name) or 0.0 for name in NAMES)


def with_share(seconds: Scalars) -> Scalars:
    """Returns the seconds by part, after `goodput`, the productive share of their sum."""
    total = sum(seconds.values())
    return {"goodput": seconds[PRODUCTIVE] / total if total > 0 else 0.0, **seconds}


def goodput_text(scalars: Scalars) -> str:
    """Returns the goodput of a run over all of its starts, with the seconds of what is lost."""
    lost = [(title, scalars[f"time_lost/{name}"]) for name, title in CATEGORIES.items()]
    parts = [f"{title} {format_seconds(x)}" for title, x in lost if x >= 0.05]
    return f"{scalars['goodput']:.1%}" + (f" ({', '.join(parts)})" if parts else "")
