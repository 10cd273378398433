"""Hugging Face folders: the parameters read back."""

import tempfile
from typing import cast

import jax
import numpy as np

from moelib.core import tree
from moelib.huggingface.families import NoFamilyError, settings_of
from moelib.huggingface.pretrained import replaced_parameters, save_pretrained
from moelib.layers.adapter import has_adapters
from moelib.models.causal_lm import CausalLM
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference


def exported(known: Reference) -> Difference | str | None:
    """Compares the parameters with those read back from an exported folder, bit for bit."""
    cfg, probe = known.config.model, known.probe
    if not isinstance(cfg, CausalLM.Config):
        raise CheckSkippedError("not a CausalLM")
    if has_adapters(cfg):
        raise CheckSkippedError("the model has adapters, which tensors of a family cannot hold")
    try:
        family, _ = settings_of(cfg)
    except NoFamilyError as error:
        raise CheckSkippedError(str(error).partition(";")[0]) from None
    if family.zeros(cfg):
        raise CheckSkippedError(f"{family.architecture} has parameters that the model lacks")
    rng, is_updated = np.random.default_rng(0), probe.trainer.learner.is_updated
    # Untrained parameters, such as balancing biases, start constant: any order would be right.
    drawn = lambda path, x: x if is_updated(path) else rng.normal(size=x.shape).astype(x.dtype)
    want = tree.map_by_path(drawn, known.start.model)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, cfg, jax.device_put(want, probe.shardings.model))
        empty = jax.device_put(jax.tree.map(np.zeros_like, want), probe.shardings.model)
        read = replaced_parameters(empty, folder, cast(CausalLM, probe.trainer.model))
    keep = lambda path: not path.endswith("/counts")  # Loads of experts are not written.
    return first_bit_difference(tree.select(want, keep), tree.select(jax.device_get(read), keep))
