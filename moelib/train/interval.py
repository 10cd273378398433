"""Metrics of a log interval: written to files, and shown as means over the tokens of its steps."""

import collections
import logging

from moelib.core.metrics import Scalars
from moelib.runs.summary_writer import SummaryWriter
from moelib.runtime.progress import Progress
from moelib.train import report
from moelib.train.metrics import NON_FINITE, language_metrics
from moelib.train.throughput import Throughput

logger = logging.getLogger(__name__)


class LogInterval:
    """The last steps of a run, as many as there are between two log lines.

    Attributes:
        last: Metrics of the last step that was checked.
        memory: Peak memory of a device, as `device_memory_gb`, if it is known.
    """

    def __init__(
        self,
        throughput: Throughput,
        progress: Progress,
        writer: SummaryWriter,
        *,
        num_steps: int,
        num_slots: int,
        num_examples: int | None,
        is_language_model: bool,
    ) -> None:
        """Starts without a step.

        Args:
            throughput: Rates of the run.
            progress: Progress line that shows the metrics.
            writer: Writer of the metrics.
            num_steps: Steps between two log lines.
            num_slots: Positions of a batch, padding included.
            num_examples: Examples of a batch, if rates are of examples; None for those of tokens.
            is_language_model: Whether metrics of a language model are added.
        """
        self._throughput, self._progress, self._writer = throughput, progress, writer
        self._num_slots, self._num_examples = num_slots, num_examples
        self._is_language_model = is_language_model
        self.last: Scalars = {}
        self.memory: Scalars = {}
        # (number of tokens, loss, cross-entropy) of each step.
        self._losses: collections.deque[tuple[float, float, float]] = collections.deque(
            maxlen=num_steps
        )

    def step_done(self, scalars: Scalars) -> None:
        """Counts a step, given its metrics."""
        self.last, weight = scalars, scalars["num_tokens"]
        counted = weight if self._num_examples is None else self._num_examples
        self._throughput.step_done(counted, self._num_slots)
        cross_entropy = scalars.get("cross_entropy", scalars["loss"])
        self._losses.append((weight, scalars["loss"], cross_entropy))

    def log(self, step: int, scalars: Scalars, of_checkpoints: Scalars) -> None:
        """Writes and shows the metrics of a step, and the rates since the last call."""
        rates = self._throughput.report()
        self.memory = {k: x for k, x in rates.items() if k == "device_memory_gb"}
        logged = {name: value for name, value in scalars.items() if name != NON_FINITE}
        logged |= rates | of_checkpoints
        if self._is_language_model:
            logged |= language_metrics(scalars)
        mean_loss, mean_cross_entropy = self.mean_losses()
        if not any(weight for weight, *_ in self._losses):
            logger.warning("step %d: the weights of the loss are 0 in %d steps.", step, len(self))
        self._writer.write(step, logged | {"mean_loss": mean_loss})
        shown = logged | {"loss": mean_loss}
        if "cross_entropy" in shown:
            shown["cross_entropy"] = mean_cross_entropy
        self._progress.update(step, report.progress_text(shown, num_steps=len(self)))

    def mean_losses(self) -> tuple[float, float]:
        """Returns the loss and the cross-entropy over the tokens of all steps."""
        counted = [each for each in self._losses if each[0]]  # A mean over no tokens may be NaN.
        tokens = sum(tokens for tokens, *_ in counted) or 1.0
        loss = sum(tokens * loss for tokens, loss, _ in counted)
        return loss / tokens, sum(tokens * ce for tokens, _, ce in counted) / tokens

    def rows(self) -> list[tuple[str, str]]:
        """Returns the row of the final table with the mean loss; none without a step."""
        if not self._losses:
            return []
        over = f" (mean of the last {len(self)} steps)" if len(self) > 1 else ""
        return [("loss", f"{self.mean_losses()[0]:.4f}{over}")]

    def __len__(self) -> int:
        """Returns the number of steps."""
        return len(self._losses)
