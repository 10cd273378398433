"""Models: what a trainer needs of a model, and where a pipeline may cut it.

Letters: B batch, S sequence, D model.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, final

import jax

from moelib.core.metrics import Metric, WeightedScalar
from moelib.core.module import in_context
from moelib.core.tree import Batch, Nested
from moelib.layers.base import BaseLayer
from moelib.layers.transformer import ScanStack


class Model(BaseLayer):
    """A layer whose forward pass returns the loss of a batch.

    Only `forward` is required; the other members have defaults.
    """

    # Whether the loss, or the metric `cross_entropy`, is in nats per token, so that perplexity is
    # defined.
    is_language_model: ClassVar[bool] = True
    # Whether a later process can build the model from the text of its config.
    is_in_config: ClassVar[bool] = True
    # Whether parameters without logical axes are sharded even if `auto_sharding` is unset.
    is_auto_sharded: ClassVar[bool] = False
    # Whether the metrics of a batch with `sources` [B, N] include `cross_entropy_by_source` [N].
    has_source_metrics: ClassVar[bool] = False

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[WeightedScalar, Mapping[str, Metric]]:
        """Returns the loss, weighted by the number of tokens it is a mean over, and metrics."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the weight of the loss is a number of tokens, not of examples."""
        return self.is_language_model

    def token_counts(self, batch: Batch) -> tuple[jax.Array, jax.Array] | None:
        """Returns the tokens of the loss and of auxiliary losses of a batch, float32.

        None weights auxiliary losses of micro-batches like the loss, and excludes a pipeline.
        """
        del batch
        return None

    def flops_per_token(self, *, seq_len: int) -> float | None:
        """Returns the matmul FLOPs per training token; None if they are unknown."""
        del seq_len
        return None

    def result_of(self, params: Nested) -> Any:
        """Returns parameters as `moelib.fit` returns them; None to leave them in the checkpoint."""
        del params
        return None

    @property
    def has_own_step(self) -> bool:
        """Whether `own_step` replaces the training step."""
        return False

    @in_context
    def own_step(
        self, batch: Batch, apply_gradients: Callable[[Nested, Nested], Nested]
    ) -> tuple[Nested, WeightedScalar, Mapping[str, Metric]]:
        """Returns the parameters after a step, its loss and metrics.

        `apply_gradients(params, gradients)` returns the parameters after the optimizer.
        """
        raise NotImplementedError


class StackedModel(Model):
    """A model that a pipeline can cut: what precedes a stack of layers, the stack, what follows.

    A module that both `before` and `after` call draws the same random numbers twice in a pipeline.
    """

    @property
    @abstractmethod
    def stack(self) -> BaseLayer:
        """The stack: this model's child, or a layer further below."""

    @abstractmethod
    @in_context
    def before(self, batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the input [B, S, D] of the stack, and its keyword arguments."""

    @abstractmethod
    @in_context
    def after(self, x: jax.Array, batch: Batch) -> tuple[WeightedScalar, Mapping[str, Metric]]:
        """Returns the loss and the metrics, given the output [B, S, D] of the stack."""

    @in_context
    def before_blocks(self, batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the input of the repeated blocks of a `ScanStack`, and their side inputs."""
        x, side_inputs = self.before(batch)
        return cast(ScanStack, self.stack).forward_first(x, side_inputs), side_inputs

    @abstractmethod
    def token_counts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of the loss and of auxiliary losses of a batch, float32."""

    @final
    def forward(self, batch: Batch) -> tuple[WeightedScalar, Mapping[str, Metric]]:
        """Returns the loss and the metrics of a batch; subclasses override the parts."""
        x, side_inputs = self.before(batch)
        return self.after(self.stack(x, **side_inputs), batch)
