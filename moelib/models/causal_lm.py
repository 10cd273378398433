"""A causal language model: embedding, decoder, norm, head."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class, maybe_instantiate
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.metrics import Metric, WeightedScalar, weighted
from moelib.core.module import Module, in_context
from moelib.core.tree import Batch
from moelib.layers.base import BaseLayer
from moelib.layers.embedding import Embedding
from moelib.layers.linear import Linear
from moelib.layers.moe.replay import with_replay
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import ScanStack
from moelib.models.loss import TokenLoss, language_model_loss, token_log_probs
from moelib.models.model import StackedModel
from moelib.models.multi_token_prediction import MULTI_TOKEN, MultiTokenPrediction
from moelib.models.objective import Objective
from moelib.parallel.sharding import constrain


class CausalLM(StackedModel):
    """Predicts each token from those before it.

    A batch holds `input_ids [B, S] int32`, `target_labels [B, S]` (negative: ignored), and
    optionally `segment_ids [B, S]` (0 is padding), `positions [B, S]`, `sources [B, N]`, which is 1
    for the source of a sequence, of N, and 0 for the others, and `expert_ids [B, S, L, K]`, the
    experts of each token in all L MoE layers (`moelib.layers.moe.replay`).
    """

    has_source_metrics = True

    @config_class
    class Config(StackedModel.Config):
        vocab_size: Required[PositiveInt] = REQUIRED  # V.
        dim: Required[PositiveInt] = REQUIRED  # D.
        embedding: Embedding.Config = Embedding.default_config()  # Vectors of the tokens.
        decoder: BaseLayer.Config = ScanStack.default_config()  # The stack of layers.
        output_norm: BaseNorm.Config = RMSNorm.default_config()  # Norm after the last layer.
        lm_head: Linear.Config | None = Linear.default_config()  # None ties it to the embedding.
        # Divides the logits, as in muP (arXiv:2203.03466) and Granite; None for 1.
        logit_divisor: PositiveFloat | None = None
        # Loss of batches with its arrays, such as preferences; None for the cross-entropy of all.
        objective: Objective.Config | None = None
        z_loss: float = 0.0  # Weight of the squared logsumexp of the logits in the objective.
        # Tokens whose logits a device holds at once in training; more take memory, fewer time. None
        # for 1,024 or more; see `moelib.kernels.cross_entropy`.
        loss_chunk_size: PositiveInt | None = None
        # Losses of further tokens, in training and as metrics of evaluations; None for none. The
        # model's own loss, its logits and generation do not use them.
        multi_token_prediction: MultiTokenPrediction.Config | None = None

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if type(self).hidden is not CausalLM.hidden:
            raise UserError(
                f"{self._title()}: {type(self).__qualname__} overrides hidden, which the loss does "
                "not call; override before and after."
            )
        self._add_child(
            "embedding", cfg.embedding.clone(num_embeddings=cfg.vocab_size, dim=cfg.dim)
        )
        self._add_child("decoder", cfg.decoder.clone(input_dim=cfg.dim))
        self._add_child("output_norm", cfg.output_norm.clone(dim=cfg.dim))
        if cfg.lm_head is not None:
            if cfg.lm_head.bias:
                raise UserError(
                    f"{self._title()}: lm_head.bias is True, but the loss has a head without bias; "
                    "set it to False."
                )
            if cfg.lm_head.quantization not in (None, Quantization.NONE):
                raise UserError(
                    f"{self._title()}: lm_head.quantization is {cfg.lm_head.quantization}, but the "
                    "loss takes no quantized head; set it to None."
                )
            if cfg.lm_head.adapter is not None:
                raise UserError(
                    f"{self._title()}: lm_head.adapter is set, but the loss takes no adapted head; "
                    "set it to None."
                )
            head = cfg.lm_head.clone(
                input_dim=cfg.dim,
                output_dim=cfg.vocab_size,
                axes=("embed", "vocab"),
                quantization=Quantization.NONE,
            )
            self._add_child("lm_head", head)
        self._objective: Objective | None = maybe_instantiate(cfg.objective)
        if cfg.objective is not None and cfg.z_loss:
            raise UserError(
                f"{self._title()}: z_loss={cfg.z_loss}, but the loss of objective has no z-loss; "
                "set z_loss to 0.0."
            )
        if cfg.multi_token_prediction is not None:
            if cfg.objective is not None:
                raise UserError(
                    f"{self._title()}: objective and multi_token_prediction are set; set one of "
                    "them to None."
                )
            self._add_child(MULTI_TOKEN, cfg.multi_token_prediction.clone(dim=cfg.dim))

    @property
    def counts_tokens(self) -> bool:
        """Whether the weight of the loss is a number of tokens, not of sequences."""
        own = self._objective is None or self._objective.counts_tokens
        return super().counts_tokens and own

    @property
    def stack(self) -> BaseLayer:
        """The decoder."""
        return cast(BaseLayer, self.children["decoder"])

    def before(self, batch: Batch) -> tuple[Float[Array, "B S D"], dict[str, Any]]:
        """Returns the vectors of the tokens, and the side inputs of the decoder."""
        if "expert_ids" in batch:
            context = self.get_invocation_context()
            context.state = with_replay(self, context.state or {}, batch["expert_ids"])
        segment_ids = batch.get("segment_ids")
        mask = None if segment_ids is None else segment_ids > 0
        x = self.embedding(batch["input_ids"])
        x = constrain(x, ("batch", "residual_sequence", "activation_embed"))
        return x, {"positions": _positions(batch), "segment_ids": segment_ids, "mask": mask}

    @in_context
    def hidden(self, batch: Batch) -> Float[Array, "B S D"]:
        """Returns the normalized output of the decoder."""
        x, side_inputs = self.before(batch)
        return self.output_norm(self.decoder(x, **side_inputs))

    def after(
        self, x: Float[Array, "B S D"], batch: Batch
    ) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns (loss, metrics): means over the batch's valid tokens and their number.

        The loss is the cross-entropy in nats plus the z-loss of the config; auxiliary losses of
        layers are outputs of their own. The metrics are `cross_entropy` and, if the batch has
        sources, `cross_entropy_by_source [N]`, which is 0 for one without valid tokens. Of a batch
        of `objective`, they are its loss and metrics, and `cross_entropy`.
        """
        hidden = self.output_norm(x)
        if self._has_objective(batch):
            return self._of_objective(hidden, batch)
        tied, head = self.config.lm_head is None, self._head_matrix(hidden.dtype)

        def token_loss(hidden: Array, labels: Array, **options: Any) -> TokenLoss:
            options["chunk_size"] = self.config.loss_chunk_size
            hidden = self._divided(hidden)
            return language_model_loss(hidden, head, labels, tied=tied, **options)

        labels, sources = batch["target_labels"], batch.get("sources")
        out = token_loss(hidden, labels, z_loss=self.config.z_loss, sources=sources)
        if self.config.multi_token_prediction is not None:
            self.multi_token_prediction(
                hidden,
                batch,
                positions=_positions(batch),
                embed=self.embedding,
                token_loss=token_loss,
            )
        num = jnp.maximum(out.num_tokens, 1.0)
        loss = WeightedScalar(out.objective / num, out.num_tokens)
        metrics: dict[str, Metric] = {
            "cross_entropy": weighted(out.cross_entropy / num, out.num_tokens)
        }
        if out.by_source is not None:
            total, counted = out.by_source.T
            mean = total / jnp.maximum(counted, 1.0)
            metrics["cross_entropy_by_source"] = WeightedScalar(mean, counted)
        return loss, metrics

    def _has_objective(self, batch: Batch) -> bool:
        return self._objective is not None and self._objective.applies_to(batch)

    def _of_objective(
        self, hidden: Float[Array, "B S D"], batch: Batch
    ) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns the loss and the metrics of a batch of the objective."""
        assert self._objective is not None
        log_probs = self._log_probs(hidden, batch)
        loss, metrics = self._objective.loss(log_probs, batch)
        num = jnp.sum(batch["target_labels"] >= 0, dtype=jnp.float32)
        total = jax.lax.stop_gradient(jnp.sum(log_probs))
        return loss, metrics | {"cross_entropy": weighted(-total / jnp.maximum(num, 1.0), num)}

    @in_context
    def log_probs(self, batch: Batch) -> Float[Array, "B S"]:
        """Returns the log probability of each label in nats, 0 where there is none."""
        return self._log_probs(self.hidden(batch), batch)

    def _log_probs(self, hidden: Float[Array, "B S D"], batch: Batch) -> Float[Array, "B S"]:
        options: dict[str, Any] = {"tied": self.config.lm_head is None}
        options["chunk_size"] = self.config.loss_chunk_size
        head = self._head_matrix(hidden.dtype)
        return token_log_probs(self._divided(hidden), head, batch["target_labels"], **options)

    def _head_matrix(self, dtype: Any) -> Array:
        """Returns the matrix of the head, cast as in `BaseLayer.operands`."""
        layer = "embedding" if self.config.lm_head is None else "lm_head"
        return self.parameters[layer]["weight"].astype(dtype)

    def token_counts(self, batch: Batch) -> tuple[Array, Array]:
        """Returns the numbers that the loss is a mean over, and of tokens without padding, float32.

        The first is that of tokens with a label, unless the batch is one of `objective`.
        """
        labels, segment_ids = batch["target_labels"], batch.get("segment_ids")
        tokens = jnp.ones_like(labels) if segment_ids is None else segment_ids
        counted = (jnp.sum(mask, dtype=jnp.float32) for mask in (labels >= 0, tokens > 0))
        num_labels, num_tokens = counted
        if self._objective is not None and self._objective.applies_to(batch):
            num_labels = self._objective.num_labels(batch)
        return num_labels, num_tokens

    @in_context
    def logits(self, batch: Batch) -> Float[Array, "B S V"]:
        """Returns the logits of the next token at every position."""
        return self.head(self.hidden(batch))

    @in_context
    def logits_at(self, batch: Batch, index: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Returns the logits of the token that follows position `index` of each sequence."""
        hidden = jnp.take_along_axis(self.hidden(batch), index[:, None, None], axis=1)
        return self.head(hidden)[:, 0]

    @in_context
    def logits_of_stream(self, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Returns the logits of the next token, as if x were the output of the decoder."""
        return self.head(self.output_norm(x))

    @in_context
    def head(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Returns the logits of the next token, given the output of `hidden`."""
        hidden = self._divided(hidden)
        if self.config.lm_head is None:
            return self.embedding.attend(hidden)
        return self.lm_head(hidden)

    def _divided(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns the input of the head: dividing it divides the logits."""
        divisor = self.config.logit_divisor
        return hidden if divisor is None else hidden / divisor

    def _own_matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        # Uses of the head's matrix, which another layer holds, and counts less often.
        further, tied = self.config.multi_token_prediction, self.config.lm_head is None
        uses = tied + (0 if further is None else further.num_depths)
        if not chosen(f"{path}{'embedding' if tied else 'lm_head'}/weight"):
            return 0.0
        return 2.0 * self.config.dim * self.config.vocab_size * uses

    def flops_per_token(self, *, seq_len: int) -> float:
        """Returns the matmul FLOPs per training token: three times those of the forward pass."""
        return 3.0 * self.forward_flops_per_token(seq_len)


def _positions(batch: Batch) -> Int[Array, "B S"]:
    """Returns the positions of a batch; those of one document per sequence if it has none."""
    shape = batch["input_ids"].shape
    return batch.get("positions", jnp.broadcast_to(jnp.arange(shape[1])[None], shape))
