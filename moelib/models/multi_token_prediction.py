"""Multi-token prediction: modules after the decoder that predict further tokens in training.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2. Module k predicts the token k + 1 ahead. The
embedding table and the output head are those of the model.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, InstantiableConfig, Required, config_class
from moelib.core.config_types import NonNegativeFloat, PositiveInt
from moelib.core.metrics import weighted
from moelib.core.module import Module
from moelib.core.tree import Batch
from moelib.layers.base import BaseLayer
from moelib.layers.linear import Linear
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.models.loss import TokenLoss
from moelib.parallel.sharding import constrain

MULTI_TOKEN = "multi_token_prediction"  # Name of the child of a model; generation does not run it.


class MultiTokenModule(BaseLayer):
    """One depth k: norms and a projection of two streams, a transformer layer, and a norm.

    The order of the streams is that of the published weights and the reverse of equation 21.
    """

    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED  # D.
        norm: BaseNorm.Config = RMSNorm.default_config()  # Norm of both inputs and of the output.
        projection: Linear.Config = Linear.default_config()  # Projection from 2 D to D.
        layer: BaseLayer.Config = TransformerLayer.default_config()  # The transformer layer.
        # Wraps the layer for recomputation, as `BaseStack.Config.remat`.
        remat: InstantiableConfig | None = None

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        for name in ("embedding_norm", "hidden_norm"):
            self._add_child(name, cfg.norm.clone(dim=cfg.dim))
        sizes = {"input_dim": 2 * cfg.dim, "output_dim": cfg.dim}
        self._add_child("projection", cfg.projection.clone(**sizes))
        stack = LoopStack.default_config().set(block=[cfg.layer], remat=cfg.remat)
        self._add_child("decoder", stack.set(input_dim=cfg.dim, num_layers=1))
        self._add_child("output_norm", cfg.norm.clone(dim=cfg.dim))

    def forward(
        self, hidden: Float[Array, "B S D"], embedded: Float[Array, "B S D"], **side_inputs: Any
    ) -> Float[Array, "B S D"]:
        """Returns the normalized output of the layer.

        Args:
            hidden: Output of depth k - 1; the normalized output of the decoder for k = 1.
            embedded: Embedding of the token k ahead.
            side_inputs: Arguments of the transformer layer.
        """
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = self.projection(jnp.concatenate(both, -1))  # [B, S, 2 D] -> [B, S, D]
        x = constrain(x, ("batch", "residual_sequence", "activation_embed"))
        return self.output_norm(self.decoder(x, **side_inputs))


class MultiTokenPrediction(BaseLayer):
    """The modules of all depths, and their losses as auxiliary losses.

    The loss of a depth is the sum of its cross-entropies over the number of tokens without padding
    (equation 24), and its weight is `loss_weight / num_depths` (equation 25). The metrics
    `depth1_cross_entropy`, ... are means over the tokens that a depth predicts.
    """

    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED  # D.
        num_depths: PositiveInt = 1  # Number of further tokens that are predicted at each position.
        # Weight of the mean of the depths' losses in the objective.
        loss_weight: NonNegativeFloat = 0.3
        module: MultiTokenModule.Config = MultiTokenModule.default_config()  # Each depth has one.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        for depth in range(1, cfg.num_depths + 1):
            self._add_child(f"depth{depth}", cfg.module.clone(dim=cfg.dim))

    def forward(
        self,
        hidden: Float[Array, "B S D"],
        batch: Batch,
        *,
        positions: Int[Array, "B S"],
        embed: Callable[[Array], Array],
        token_loss: Callable[[Array, Array], TokenLoss],
    ) -> None:
        """Adds the losses. Nothing is predicted from or across the end of a document.

        Args:
            hidden: The normalized output of the decoder.
            batch: The batch of the model.
            positions: Position of each token in its document.
            embed: Function from token ids [B, S] to their embeddings.
            token_loss: Function from hidden states and labels to the loss of the model's head.
        """
        ids, labels = batch["input_ids"], batch["target_labels"]
        segment_ids = batch.get("segment_ids", jnp.ones_like(ids))
        num_tokens = jnp.maximum(jnp.sum(segment_ids > 0, dtype=jnp.float32), 1.0)
        for depth in range(1, self.config.num_depths + 1):
            inside = (_ahead(segment_ids, depth) == segment_ids) & (segment_ids > 0)
            hidden = self.children[f"depth{depth}"](
                hidden,
                embed(_ahead(ids, depth)),
                positions=positions,
                segment_ids=segment_ids,
                mask=inside,
            )
            out = token_loss(hidden, jnp.where(inside, _ahead(labels, depth), -1))
            weight = self.config.loss_weight / self.config.num_depths
            self.add_aux_loss(f"depth{depth}_loss", out.objective / num_tokens, weight=weight)
            mean = weighted(out.cross_entropy / jnp.maximum(out.num_tokens, 1.0), out.num_tokens)
            self.add_summary(f"depth{depth}_cross_entropy", mean)


def _ahead(x: Int[Array, "B S"], num: int) -> Int[Array, "B S"]:
    """Returns the entry `num` positions ahead of each position; 0 past the end."""
    return jnp.pad(x, ((0, 0), (0, num)))[:, num:]
