"""A language model that a few lines of NumPy reproduce: a bag of the tokens read so far.

Letters: B batch, S sequence, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.config import REQUIRED, config_class
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.models.model import Model

DIM = 16


class BagLM(Model):
    """Predicts from the newest token and from the mean of all tokens of its segment so far."""

    @config_class
    class Config(Model.Config):
        vocab_size: int = REQUIRED

    def _create_layer_parameter_specs(self):
        size = self.config.vocab_size
        return {
            "table": ParameterSpec((size, DIM), ("vocab", "embed")),
            "head": ParameterSpec((DIM, size), ("embed", "vocab")),
        }

    def forward(self, batch):
        labels = batch["target_labels"]
        log_probs = jax.nn.log_softmax(self.head(self.hidden(batch)))
        picked = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        num = jnp.sum((labels >= 0).astype(jnp.float32))
        loss = -jnp.sum(jnp.where(labels >= 0, picked, 0.0)) / num
        return weighted(loss, num), {}

    def hidden(self, batch):
        x = self.parameters["table"][batch["input_ids"]]  # [B, S, D]
        segment_ids, positions = batch["segment_ids"], batch["positions"]
        seen = segment_ids[:, :, None] == segment_ids[:, None, :]
        seen &= positions[:, :, None] >= positions[:, None, :]  # [B, S, S]
        weights = seen.astype(x.dtype) * (segment_ids > 0).astype(x.dtype)[:, None, :]
        bag = weights @ x / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
        return x + bag

    def head(self, hidden):
        return hidden @ self.parameters["head"]


def bag_lm(vocab_size):
    """Returns (model, parameters)."""
    model = BagLM.default_config().set(vocab_size=vocab_size).instantiate(parent=None)
    return model, {name: jnp.asarray(value) for name, value in bag_params(vocab_size).items()}


def bag_params(vocab_size):
    """Returns the parameters as NumPy arrays, float32."""
    cells = np.arange(vocab_size * DIM, dtype=np.float64)
    return {
        "table": np.sin(1 + 0.731 * cells).reshape(vocab_size, DIM).astype(np.float32),
        "head": np.cos(2 + 1.317 * cells).reshape(DIM, vocab_size).astype(np.float32),
    }


def bag_log_probs(params, ids, vocab_size):
    """Returns log-probabilities of the next token after each of ids, float64 [S, V]."""
    table, head = (params[name].astype(np.float64) for name in ("table", "head"))
    x = table[np.asarray(ids)]
    bag = np.cumsum(x, axis=0) / np.arange(1, len(x) + 1)[:, None]
    logits = ((x + bag) @ head)[:, :vocab_size]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
