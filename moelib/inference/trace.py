"""What a model computes inside, for one text: experts, attention, residual stream, predictions.

Letters: S tokens, D model, H heads, E experts, K experts per token, V vocabulary.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError, refuse_single_strings
from moelib.core.module import functional
from moelib.core.tree import Nested
from moelib.inference.generate import check_model
from moelib.inference.unstack import unstacked
from moelib.layers.tracing import ATTENTION_WEIGHTS, HIDDEN, NAMES, TRACED
from moelib.models.causal_lm import CausalLM

_MAX_ATTENTION = 1 << 30  # Bytes of all attention weights.


@dataclasses.dataclass(frozen=True)
class Trace:
    """The arrays of one text, as NumPy arrays.

    `layers` has a dictionary for each layer path, such as "decoder.layer3.feed_forward", with those
    of its arrays that it has: "hidden" [S, D], the residual stream after the layer;
    "attention_weights" [S, H, S], of each query, head and key; "router_probs" [S, E]; "expert_ids"
    and "expert_weights" [S, K], best first.
    """

    ids: list[int]  # Token ids.
    tokens: list[str]  # Text of each token.
    layers: dict[str, dict[str, npt.NDArray[Any]]]  # By layer path; see above.
    logits: npt.NDArray[np.float32]  # [S, V] of the token after each token.
    # [S - 1] cross-entropy of each token but the first, in nats.
    losses: npt.NDArray[np.float32]
    # Ids and probabilities of the most likely next tokens [S, n], by path of the layer after which
    # the model's last norm and head are applied (logit lens).
    predictions: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]

    def __repr__(self) -> str:
        first, count = " ".join(self.tokens[:8]), len(self.tokens)
        return f"Trace({count} tokens {first!r:.60}, {len(self.layers)} layers)"

    @property
    def residual_norms(self) -> dict[str, npt.NDArray[Any]]:
        """The length of the residual stream [S] after each layer, by path."""
        streams = {path: arrays.get(HIDDEN) for path, arrays in self.layers.items()}
        return {p: np.linalg.norm(x, axis=-1) for p, x in streams.items() if x is not None}


def trace(
    model: Any,
    text: str | Sequence[int],
    *,
    layers: str = ".*",
    names: Sequence[str] = NAMES,
    num_predictions: int = 5,
) -> Trace:
    r"""Returns what a model computes for a text.

        model = moelib.load_model("runs/flame")
        found = moelib.trace(model, "Once upon a time", layers=r".*layer3\..*")
        found.layers["decoder.layer3.feed_forward"]["expert_ids"]

    Args:
        model: A `moelib.runs.loading.LoadedModel`, from `moelib.load_model`.
        text: A text, or its token ids; two tokens or more.
        layers: Regular expression of the paths of layers whose arrays are kept.
        names: Names of the arrays that are kept; see `Trace`.
        num_predictions: Number n of predictions after each layer.

    Raises:
        UserError: If the text has fewer than two tokens or too many, a name is unknown, or no layer
            has such a path and array.
    """
    check_model(model)
    refuse_single_strings(names=names)
    is_ids = isinstance(text, Sequence | np.ndarray | jax.Array) and not isinstance(text, str)
    is_ids = is_ids and all(isinstance(i, int | np.integer | jax.Array) for i in text)
    if not isinstance(text, str) and not is_ids:
        raise UserError(f"text is {text!r:.80}; pass one text, or its token ids.")
    try:
        re.compile(layers)
    except re.error as error:
        raise UserError(f"layers={layers!r} is no regular expression ({error}).") from None
    for name in names:
        if name not in NAMES:
            raise UserError(f"names has {name!r}; {did_you_mean(name, NAMES)}")
    ids = model.tokenizer.encode_prompts([text])[0] if isinstance(text, str) else list(text)
    if len(ids) < 2 or not all(0 <= i < model.model.config.vocab_size for i in ids):
        raise UserError(f"text is {text!r:.80}: it must have two or more tokens of the model.")
    if model.max_length is not None and len(ids) > model.max_length:
        raise UserError(
            f"text has {len(ids)} tokens, and the model was trained with {model.max_length}; "
            "shorten it."
        )
    wanted = frozenset((*names, HIDDEN))
    with model.on_mesh():
        module, params = unstacked(model.model, model.parameters)
        if ATTENTION_WEIGHTS in wanted:
            _check_size(module, len(ids))
        logits, found, streams = _run(module, params, jnp.asarray([ids], jnp.int32), wanted)
        number = min(num_predictions, logits.shape[-1])
        best = {path: _predict(module, params, x, number) for path, x in streams.items()}
    predictions = {path: (np.asarray(i[0]), np.asarray(p[0])) for path, (i, p) in best.items()}
    kept = {
        path: {name: np.asarray(x[0]) for name, x in arrays.items() if name in names}
        for path, arrays in found.items()
        if re.fullmatch(layers, path)
    }
    kept = {path: arrays for path, arrays in kept.items() if arrays}
    if not kept:
        raise UserError(
            f"layers={layers!r} matches no layer with {', '.join(names)}; the paths are "
            f"{', '.join(found)!s:.400}."
        )
    logits = np.asarray(logits[0], np.float32)
    log_probs = jax.nn.log_softmax(logits[:-1], axis=-1)
    losses = -np.asarray(log_probs)[np.arange(len(ids) - 1), ids[1:]]
    tokens = [model.tokenizer.decode([i]) for i in ids]
    return Trace(ids, tokens, kept, logits, losses, predictions)


def _check_size(module: CausalLM, length: int) -> None:
    """Raises UserError if the weights of attention take too much memory."""
    heads = sum(getattr(layer.config, "num_heads", 0) for layer, _ in module.walk())
    if 4 * heads * length**2 > _MAX_ATTENTION:
        raise UserError(
            f"The attention weights of {length} tokens and {heads} heads take "
            f"{4 * heads * length**2 / 2**30:.1f} GiB; set names without {ATTENTION_WEIGHTS!r}, or "
            "shorten the text."
        )


def _run(
    module: CausalLM, params: Nested, ids: jax.Array, names: frozenset[str]
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]], dict[str, jax.Array]]:
    """Returns the logits, the arrays by layer path and name, and the streams by layer path."""
    logits, outputs = _forward(module, params, ids, names)
    found: dict[str, dict[str, jax.Array]] = {}
    for path, value in tree.by_path(outputs).items():
        layer, _, name = path.rpartition("/")
        if name in names:
            found.setdefault(layer.replace("/", "."), {})[name] = value
    streams = {path: arrays[HIDDEN] for path, arrays in found.items() if HIDDEN in arrays}
    return logits, found, streams


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward(
    module: CausalLM, params: Nested, ids: jax.Array, names: frozenset[str]
) -> tuple[jax.Array, Mapping[str, Any]]:
    batch = {"input_ids": ids}
    how = {"is_training": False, "method": "logits", "inherited": {TRACED: names}}
    logits, outputs = functional(module, None, params, (batch,), **how)
    return logits, outputs.module_outputs


@functools.partial(jax.jit, static_argnums=(0, 3))
def _predict(
    module: CausalLM, params: Nested, stream: jax.Array, number: int
) -> tuple[jax.Array, jax.Array]:
    """Returns ids and probabilities of the most likely next tokens [1, S, n]."""
    logits, _ = functional(
        module, None, params, (stream,), is_training=False, method="logits_of_stream"
    )
    probs, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), number)
    return ids, probs
