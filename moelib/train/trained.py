"""A trainer as its loop sees it: what it must offer so that its steps are taken."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.restore import Restored
from moelib.core.metrics import Scalars
from moelib.data.batches.input import Input
from moelib.runs.folder import RunFolder
from moelib.runs.summary_writer import SummaryWriter
from moelib.train.metrics import PackedMetrics
from moelib.train.watcher import Watcher


class Trained(Protocol):
    """A trainer, as its loop sees it."""

    model: Any
    folder: RunFolder
    evalers: Mapping[str, Any]
    watchers: Mapping[str, Watcher]
    summary_writer: SummaryWriter
    saver: Checkpointer | None
    began: float  # Time of the start, in seconds since 1970.
    restore_seconds: float  # Time of restoring or initializing the state.
    restored: Restored | None  # The checkpoint of the state, without its arrays.
    step: int  # Step of the state.
    input_state: dict[str, Any] | None  # Position in the data then, None at the beginning.

    @property
    def config(self) -> Any:
        """The `SpmdTrainer.Config`."""

    @property
    def input(self) -> Input:
        """The training input, opened on first use."""

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of the arrays [B, S]."""

    @property
    def trainer_state(self) -> Any:
        """The current `TrainerState`."""

    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh."""

    def describe(self) -> str:
        """Returns what is printed before the first step."""

    def flops_per_token(self) -> float | None:
        """Returns the FLOPs per token of training; None if unknown."""

    def save_tokenizer(self) -> None:
        """Writes the input's tokenizer into the folder of the run."""

    def run_step(self, batch: Any, *, input_state: dict[str, Any] | None) -> PackedMetrics:
        """Dispatches a step."""

    def model_params_for_eval(self) -> Any:
        """Returns the parameters to evaluate."""

    def save_checkpoint(self, metrics: Scalars, *, local: bool) -> None:
        """Starts to save the state, with metrics."""
