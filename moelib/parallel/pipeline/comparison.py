"""Pipeline schedules compared: idle time, activations, and a chart of each."""

from collections.abc import Sequence

from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.timeline import Timeline, simulate
from moelib.runtime.table import Table

_FOOTNOTES = (
    "Every pass of a chunk takes as long: forward, gradient of inputs, gradient of weights.",
    "Activations are those of a micro-batch in a rank's layers, until their weights' gradient.",
    "F forward, B backward, I gradient of inputs, W of weights, X forward and backward together;",
    "lower case: the second chunk of a rank.",
)


def schedule_timelines(texts: Sequence[str]) -> dict[str, Timeline]:
    """Returns the timelines of schedules such as "dualpipe-v:4x16" (ranks x micro-batches).

    Raises:
        UserError: If a text is no schedule, or the schedule needs more micro-batches.
    """
    found, names = {}, [each.value for each in Schedule]
    for text in texts:
        name, _, sizes = text.partition(":")
        if name not in names:
            raise UserError(f"schedule={text!r}: unknown schedule; {did_you_mean(name, names)}")
        numbers = sizes.split("x")
        if len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
            raise UserError(f"schedule={text!r}: write ranks x micro-batches, as in {name}:4x16.")
        num_ranks, num_microbatches = map(int, numbers)
        found[text] = simulate(Schedule(name), num_ranks, num_microbatches)
    return found


def schedules_table(timelines: dict[str, Timeline]) -> Table:
    """Returns idle shares and memory of schedules."""
    rows = []
    for text, timeline in timelines.items():
        chunks = Schedule(text.partition(":")[0]).num_chunks
        peaks = [peak / chunks for peak in timeline.peak_activations(until_weights=True)]
        rows.append(
            [
                text,
                f"{max(timeline.idle) / timeline.end:.1%}",
                f"{max(peaks):.3g}",
                f"{min(peaks):.3g}",
                f"{max(timeline.peak_deferred)}",
            ]
        )
    columns = ["schedule", "idle>", "activations, most>", "least>", "deferred weight gradients>"]
    return Table("Pipeline schedules", columns, rows, _FOOTNOTES)
