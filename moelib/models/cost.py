"""Exact cost of a model from its config: parameters, FLOPs per token, bytes of state."""

import dataclasses

import jax

from moelib.core import tree
from moelib.core.param import is_spec
from moelib.models.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """Counts of one model."""

    total_parameters: int  # All trainable parameters.
    active_parameters: int  # Trainable parameters used to compute one token.
    active_non_embedding_parameters: int  # Active parameters without embedding and output head.
    # Matmul FLOPs per training token, three times those of the forward pass, as if all parameters
    # were trained; attention counts the keys that the causal mask admits.
    train_flops_per_token: float
    parameter_bytes: int  # Bytes of all stored parameters.


def model_cost(model: CausalLM, *, seq_len: int) -> ModelCost:
    """Returns the counts of a model at a sequence length."""
    specs = model.create_parameter_specs_recursively()
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    active = model.active_parameters()
    outside = [model.children[n] for n in ("embedding", "lm_head") if n in model.children]
    return ModelCost(
        total_parameters=sum(spec.size for spec in leaves if spec.trainable),
        active_parameters=active,
        active_non_embedding_parameters=active - sum(m.active_parameters() for m in outside),
        train_flops_per_token=model.flops_per_token(seq_len=seq_len),
        parameter_bytes=tree.count_bytes(specs),
    )
