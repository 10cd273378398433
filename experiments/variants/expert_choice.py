"""Expert choice: each expert takes the tokens that score highest for it.

Source: Zhou et al., Expert Choice Routing, arXiv:2202.09368, eq. 1 and 2.

Every expert has the same load by construction. The price: whether an expert takes a token depends
on the scores of all tokens of the group, later ones of the same sequence included. The training
loss of a causal language model is computed with this leak, and a model may learn to use it. Outside
of training the choice is causal: an expert takes the tokens whose score reaches a threshold, the
mean of the lowest scores that it took in training. Only such losses compare with other routers'.

Shapes: B batch, S sequence, D model, E experts, K experts per token at most, G groups of N tokens.
"""

import enum
import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.config_types import PositiveInt
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import FLOAT32, BaseLayer, bias_spec, weight_spec
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.layers.remat import save_activation, save_routing

logger = logging.getLogger(__name__)


class ChoiceGroup(enum.Enum):
    """The tokens among which experts choose."""

    BATCH = "batch"  # All tokens of a micro-batch, on all devices.
    SEQUENCE = "sequence"  # The tokens of each sequence.


class ExpertChoiceRouter(BaseLayer):
    """Gives each expert its ceil(c N / E) best tokens of a group of N, padding excluded.

    The capacity factor c is `num_experts_per_token`: the mean number of experts per token. Weights
    are the softmax scores over the experts.
    """

    mixes_documents = True

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[PositiveInt] = REQUIRED  # c.
        group: ChoiceGroup = ChoiceGroup.BATCH  # Tokens among which experts choose.
        # K: of the experts that take a token, those with lower scores lose it. None for no limit; a
        # limit saves memory for K T rows.
        max_experts_per_token: PositiveInt | None = None
        threshold_decay: float = 0.95  # Of the mean of lowest scores, per micro-batch.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        _warn_of_leak(type(self).__qualname__)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        dim, num = self.config.input_dim, self.config.num_experts
        even = initializers.constant(1 / num)
        return {
            "weight": weight_spec((dim, num), ("embed", None), **FLOAT32),
            "threshold": bias_spec((num,), (None,), initializer=even, trainable=False),
        }

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the routing; the id of an assignment to no expert is E."""
        cfg, p = self.config, self.parameters
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            p["weight"],
            precision=jax.lax.Precision.HIGHEST,
        )
        logits = save_activation(logits, "router_logits")
        probs = jax.nn.softmax(logits, -1)
        scores = jnp.where(mask[..., None], jax.lax.stop_gradient(probs), -1.0)
        if self.is_training:
            chosen = self._choose(scores)
            lowest = jnp.min(jnp.where(chosen, scores, jnp.inf), (0, 1))  # [E]
            mean = cfg.threshold_decay * p["threshold"] + (1 - cfg.threshold_decay) * lowest
            new = jnp.where(jnp.isfinite(lowest), mean, p["threshold"])
            self.add_state_update("threshold", new)
        else:
            chosen = scores >= p["threshold"][None, None]
        limit = min(cfg.max_experts_per_token or cfg.num_experts, cfg.num_experts)
        best, ids = jax.lax.top_k(jnp.where(chosen, scores, -1.0), limit)
        ids = save_routing(jnp.where(best >= 0, ids, cfg.num_experts))
        weights = jnp.take_along_axis(probs, jnp.minimum(ids, cfg.num_experts - 1), -1)
        tokens = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
        mean = lambda x: weighted(jnp.sum(x, dtype=jnp.float32) / tokens, tokens)
        self.add_summary("experts_per_token", mean(best >= 0))
        self.add_summary("tokens_without_expert", mean(mask & ~jnp.any(chosen, -1)))
        self.add_summary("over_limit", mean(jnp.maximum(jnp.sum(chosen, -1) - limit, 0)))
        return Routing(ids, jnp.where(best >= 0, weights, 0.0), probs, logits, mask)

    def _choose(self, scores: Float[Array, "B S E"]) -> Bool[Array, "B S E"]:
        """Returns whether an expert takes a token; ties go to earlier tokens."""
        cfg, shape = self.config, scores.shape
        if cfg.group is ChoiceGroup.BATCH:
            scores = scores.reshape(1, -1, shape[-1])
        rank = jnp.argsort(jnp.argsort(-scores, 1, stable=True), 1)  # [G, N, E]
        num = jnp.sum(scores[..., :1] >= 0, 1, keepdims=True, dtype=jnp.int32)  # Valid tokens.
        capacity = -(-num * cfg.num_experts_per_token // cfg.num_experts)
        return ((rank < capacity) & (scores >= 0)).reshape(shape)


@functools.cache
def _warn_of_leak(name: str) -> None:
    """Logs the warning once per process."""
    logger.warning(
        "%s: experts choose among all tokens in training, later ones included: training losses of "
        "a causal model are too low. Evaluations choose by thresholds, without the leak.",
        name,
    )


class UseExpertChoice(ConfigModifier):
    """Routes all MoE layers of a trainer's model by `ExpertChoiceRouter`, without other losses."""

    @config_class
    class Config(ConfigModifier.Config):
        group: ChoiceGroup = ChoiceGroup.BATCH  # See `ExpertChoiceRouter`.
        max_experts_per_token: PositiveInt | None = 8  # See `ExpertChoiceRouter`.

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""
        own = {n: getattr(self.config, n) for n in ("group", "max_experts_per_token")}

        def changed(moe: MoELayer.Config) -> MoELayer.Config:
            router = ExpertChoiceRouter.default_config().set(**own)
            return moe.clone(router=router, load_balance_loss=None, router_z_loss=None)

        replace_layer_config_recursively(cfg.model, MoELayer, changed)
        return cfg
