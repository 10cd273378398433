"""The gradient-noise scale: the batch size beyond which a larger one averages out little noise.

The gradient of a batch of n tokens is the true gradient G plus noise, of squared norm
tr(Sigma) / n on average. The squared norms at two batch sizes give unbiased estimates of |G|^2 and
tr(Sigma); here they are those of the micro-batches and of their sum. The ratio of two single
estimates is biased, that of their averages over many steps is not.

Source: McCandlish et al., arXiv:1812.06162, appendix A.1; B_simple is tr(Sigma) / |G|^2. Weights of
micro-batches with different numbers of tokens are ours: each counts by its tokens.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.errors import UserError
from moelib.core.metrics import Scalars, WeightedScalar
from moelib.learner.transforms import global_norm
from moelib.train.watcher import Watcher

SQUARED_NORM, TRACE = "gradient_noise/squared_norm", "gradient_noise/covariance_trace"
SCALE = "gradient_noise/scale"

_SMALL, _PER_TOKEN = "gradient_noise/small", "gradient_noise/per_token"  # Of a step only.
_DECAY = 0.99  # Of the running averages per step: over some 100 steps.


def check(log_gradient_noise: bool, num_microbatches: int, *, in_pipeline: bool) -> None:
    """Raises UserError if estimates are asked of a step without gradients of two batch sizes."""
    if not log_gradient_noise:
        return
    if in_pipeline:
        raise UserError(
            "log_gradient_noise=True, but pipeline_schedule has an effect on this mesh: a pipeline "
            "adds up the gradients of micro-batches as it computes them, without their norms; set "
            "log_gradient_noise=False, or pipeline=1 and no schedule."
        )
    if num_microbatches < 2:
        raise UserError(
            f"log_gradient_noise=True, but num_microbatches={num_microbatches}: the estimates "
            "compare the gradients of micro-batches with those of the batch; set num_microbatches "
            "to 2 or more."
        )


def of_microbatch(gradients: Any, num_tokens: jax.Array, share: Any) -> dict[str, WeightedScalar]:
    """Returns what `estimates` needs of a micro-batch, as metrics that are combined over all.

    Args:
        gradients: Tree of `share` times the gradients of a mean over the tokens.
        num_tokens: Number of the tokens, 0 or more.
        share: Factor of the gradients, 0 without tokens.
    """
    with jax.named_scope("gradient_noise"):
        counts = num_tokens > 0
        norm = global_norm(gradients) / jnp.where(counts, share, 1.0)
        mean = lambda value: WeightedScalar(jnp.where(counts, value, 0.0), num_tokens)
        # The mean of 1 / n, weighted by n, is the number of micro-batches per token of the batch.
        per_token = 1.0 / jnp.maximum(num_tokens, 1e-30)
        return {_SMALL: mean(jnp.square(norm)), _PER_TOKEN: mean(per_token)}


def estimates(metrics: dict[str, Any], norm: jax.Array) -> dict[str, jax.Array]:
    """Takes what `of_microbatch` added out of the metrics of a step, and returns the estimates.

    Args:
        metrics: Metrics of all micro-batches together.
        norm: Norm of the gradients of the whole batch, over the same parameters.

    Returns:
        `gradient_noise/squared_norm`, of |G|^2, and `gradient_noise/covariance_trace`, of the trace
        of the covariance of one token's gradient; both may be negative, and are NaN if fewer than
        two micro-batches have tokens.
    """
    small, per_token = metrics.pop(_SMALL), metrics.pop(_PER_TOKEN)
    big = jnp.square(norm)
    one_over_big = 1.0 / small.weight
    trace = (small.mean - big) / (per_token.mean - one_over_big)
    return {TRACE: trace, SQUARED_NORM: big - trace * one_over_big}


class NoiseScale(Watcher):
    """Running averages of the estimates of all steps; they start again with the process."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._averages: Scalars = {}

    def step_done(self, step: int, scalars: Scalars) -> Scalars:
        """Adds the estimates of a step to the averages, unless they are not finite.

        Adds `gradient_noise/scale`, in tokens, the ratio of the averages. It is NaN while the
        average of |G|^2 is not positive.
        """
        del step
        new = {name: scalars[name] for name in (SQUARED_NORM, TRACE)}
        if all(map(math.isfinite, new.values())):
            # Both begin at 0, which cancels in the ratio.
            average = lambda name: self._averages.get(name, 0.0) * _DECAY + new[name] * (1 - _DECAY)
            self._averages = {name: average(name) for name in new}
        squared_norm = self._averages.get(SQUARED_NORM, 0.0)
        scale = self._averages[TRACE] / squared_norm if squared_norm > 0 else math.nan
        return {**scalars, SCALE: scale}
