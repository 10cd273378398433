"""A trainer as its loop sees it: its parts, and what it does with the state."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.metrics import Scalars
from moelib.data.batches.prefetch import Prefetcher
from moelib.runs.folder import RunFolder
from moelib.runs.summary_writer import SummaryWriter
from moelib.train.evaler import SpmdEvaler
from moelib.train.metrics import PackedMetrics
from moelib.train.start import Start
from moelib.train.watcher import Watcher


class Trained(Protocol):
    """A trainer, as its loop sees it."""

    model: Any
    folder: RunFolder
    evalers: Mapping[str, SpmdEvaler]
    watchers: Mapping[str, Watcher]
    summary_writer: SummaryWriter
    saver: Checkpointer | None

    @property
    def config(self) -> Any:
        """The `SpmdTrainer.Config`."""

    @property
    def trainer_state(self) -> Any:
        """The current `TrainerState`."""

    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh."""

    def flops_per_token(self) -> float | None:
        """Returns the training FLOPs per token, or None if the model does not count them."""

    def describe(self) -> str:
        """Returns what is printed before the first step."""

    def open_input(self, start: Start) -> Prefetcher[Any]:
        """Returns the batches of a start."""

    def run_step(self, batch: Any, *, input_state: dict[str, Any] | None) -> PackedMetrics:
        """Dispatches a step."""

    def model_params_for_eval(self) -> Any:
        """Returns the parameters to evaluate."""

    def save_checkpoint(self, metrics: Scalars, *, local: bool) -> None:
        """Starts to save the state, with metrics."""
