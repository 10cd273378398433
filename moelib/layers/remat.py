"""Recomputation: the activations that a block saves for its backward pass, by name.

Layers name the results of their matmuls by `save_activation`; a config lists the names that stay on
the device, and those offloaded to the host's memory. Activations without a name, or not listed, are
recomputed. The routing is always saved: it is a few integers per token, recomputing it takes sorts,
and the result would have to be identical.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moelib.core.config import did_you_mean
from moelib.core.context import inherited, inheriting
from moelib.core.errors import UserError

# The members of `jax.checkpoint_policies` that are policies; the others there build policies.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)

_ROUTING = "routing"
_DOT = "dot"
_SCOPE = "saved activations"  # Name of the `_Scope` that contexts inherit.


@dataclasses.dataclass
class _Scope:
    """The names in a block that is being traced, or in a group of blocks."""

    saved: tuple[str, ...] = ()  # Names that the block saves or offloads.
    wanted: tuple[str, ...] = ()  # Names that must be seen by the end of the scope.
    is_group: bool = False  # Whether the blocks inside leave the check to this scope.
    seen: set[str] = dataclasses.field(default_factory=set)


def save_activation(x: jax.Array, name: str) -> jax.Array:
    """Returns x, named so that `remat` can save or offload it."""
    is_saved(name)
    return checkpoint_name(x, name)


def save_routing(x: Any) -> Any:
    """Returns arrays of the routing, named so that every `remat` saves them.

    Arrays [T, K] are saved as [K T]: TPUs may pad the last of several dimensions to 128.
    """

    def save(leaf: jax.Array) -> jax.Array:
        if leaf.ndim != 2:
            return checkpoint_name(leaf, _ROUTING)
        flat = checkpoint_name(jnp.matrix_transpose(leaf).reshape(-1), _ROUTING)
        return jnp.matrix_transpose(flat.reshape(leaf.shape[::-1]))

    return jax.tree.map(save, x)


def save_dot(x: jax.Array) -> jax.Array:
    """Returns a dense product, named for policies of dots, which see none in a custom gradient."""
    return checkpoint_name(x, _DOT)


def is_saved(name: str) -> bool:
    """Returns whether the block being traced saves or offloads the activation of this name.

    For layers that pass the name on to a kernel instead of calling `save_activation`.
    """
    if (scope := inherited(_SCOPE)) is None:
        return False
    scope.seen.add(name)
    return name in scope.saved


def remat(
    policy: str | None = None,
    prevent_cse: bool = False,
    keep: Sequence[str] = (),
    offload: Sequence[str] = (),
) -> Callable[[Callable], Callable]:
    """Returns a wrapper that recomputes a block in the backward pass instead of storing it.

    Args:
        policy: Activations to save, as one of REMAT_POLICIES; None saves the block's input and the
            activations named in `keep` and `offload`.
        prevent_cse: Whether the compiler must not merge the recomputation with the forward pass.
            Required outside a scan; stacks set it.
        keep: Names of the activations to save on the device; see `save_activation`.
        offload: Names of the activations to save in the host's memory.

    Raises:
        UserError: If the policy is unknown, or combined with names, or a name is in both lists;
            and when the block is traced, if it lacks a name (see `names_checked_together`).
    """
    if policy is not None and policy not in REMAT_POLICIES:
        raise UserError(
            f"remat policy {policy!r} is unknown; {did_you_mean(policy, REMAT_POLICIES)}"
        )
    names = (*keep, *offload)
    if policy is not None and names:
        raise UserError(
            f"remat: policy is {policy!r} and {', '.join(names)} are named; set one of the two."
        )
    if twice := sorted(set(keep) & set(offload)):
        raise UserError(f"remat: {', '.join(twice)} cannot be both kept and offloaded.")
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names(*keep, _ROUTING)
    if policy is not None:
        dots = policies.save_only_these_names(_ROUTING, _DOT)
        chosen = dots if policy.startswith("dots") else chosen
        chosen = policies.save_from_both_policies(chosen, getattr(policies, policy))
    elif offload:
        chosen = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*keep, _ROUTING],
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    checkpoint = functools.partial(jax.checkpoint, policy=chosen, prevent_cse=prevent_cse)
    if not names:
        return checkpoint

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _traced(names, names):
                return fn(*args, **kwargs)

        return checkpoint(run)

    return wrap


@contextlib.contextmanager
def names_checked_together(*, check: bool = True) -> Iterator[None]:
    """Makes it enough that one of the blocks traced inside has a name; checks them at the end.

    Without `check`, a name may also be one of blocks that are traced elsewhere.
    """
    outer = inherited(_SCOPE)
    with _traced(() if outer is None else outer.saved, is_group=True) as scope:
        yield
        if not check:
            scope.wanted = ()


@contextlib.contextmanager
def _traced(
    saved: tuple[str, ...], wanted: tuple[str, ...] = (), is_group: bool = False
) -> Iterator[_Scope]:
    """Traces a scope. Raises UserError at its end if it lacks a name, or leaves that to a group."""
    outer, scope = inherited(_SCOPE), _Scope(saved, wanted, is_group)
    with inheriting(**{_SCOPE: scope}):
        yield scope
    if outer is not None:
        outer.seen |= scope.seen
        if outer.is_group:
            outer.wanted += scope.wanted
            return
    for name in scope.wanted:
        if name not in scope.seen:
            raise UserError(f"remat: no block has {name!r}; {did_you_mean(name, scope.seen)}")
