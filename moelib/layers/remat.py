"""Recomputation: the activations that a block saves for its backward pass, by name.

Layers name the results of their matmuls by `save_activation`; a config lists the names that stay on
the device, and those offloaded to the host's memory. Activations without a name, or not listed, are
recomputed. The routing is always saved: it is a few integers per token, recomputing it takes sorts,
and the result would have to be identical.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from moelib.core.config import did_you_mean

# The members of `jax.checkpoint_policies` that are policies; the others there build policies.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)

_ROUTING = "routing"

_seen: ContextVar[set[str] | None] = ContextVar("moelib_seen_names", default=None)
_saved: ContextVar[frozenset[str]] = ContextVar("moelib_saved_names", default=frozenset())
# (names, names seen) of each block traced inside `names_checked_together`.
_group: ContextVar[list[tuple[Sequence[str], set[str]]] | None] = ContextVar(
    "moelib_remat_group", default=None
)


def save_activation(x: jax.Array, name: str) -> jax.Array:
    """Returns x, named so that `remat` can save or offload it."""
    _see(name)
    return checkpoint_name(x, name)


def save_routing(x: Any) -> Any:
    """Returns arrays of the routing, named so that every `remat` saves them."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _ROUTING), x)


def is_saved(name: str) -> bool:
    """Returns whether the block being traced saves or offloads the activation of this name.

    For layers that pass the name on to a kernel instead of calling `save_activation`.
    """
    _see(name)
    return name in _saved.get()


def _see(name: str) -> None:
    seen = _seen.get()
    if seen is not None:
        seen.add(name)


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
        ValueError: If the policy is unknown, or combined with names, or a name is in both lists;
            and when the block is traced, if it lacks a name (see `names_checked_together`).
    """
    if policy is not None and policy not in REMAT_POLICIES:
        raise ValueError(
            f"remat policy {policy!r} is unknown; {did_you_mean(policy, REMAT_POLICIES)}"
        )
    names = (*keep, *offload)
    if policy is not None and names:
        raise ValueError(
            f"remat: policy is {policy!r} and {', '.join(names)} are named; set one of the two."
        )
    if twice := sorted(set(keep) & set(offload)):
        raise ValueError(f"remat: {', '.join(twice)} cannot be both kept and offloaded.")
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names(*keep, _ROUTING)
    if policy is not None:
        chosen = policies.save_from_both_policies(chosen, getattr(policies, policy))
    elif offload:
        chosen = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*keep, _ROUTING],
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    checkpoint = functools.partial(jax.checkpoint, policy=chosen, prevent_cse=prevent_cse)
    return lambda fn: checkpoint(_checked(fn, names))


def _checked(fn: Callable, names: Sequence[str]) -> Callable:
    """Returns fn, which when traced raises ValueError if it lacks a name."""
    if not names:
        return fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _recorded(names) as seen:
            result = fn(*args, **kwargs)
        if (group := _group.get()) is None:
            _check_names(names, seen)
        else:
            group.append((names, seen))
        return result

    return run


@contextlib.contextmanager
def names_checked_together() -> Iterator[None]:
    """Makes it enough that one of the blocks traced inside has a name; checks them at the end."""
    group: list[tuple[Sequence[str], set[str]]] = []
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
    seen = set[str]().union(*(each for _, each in group))
    for names, _ in group:
        _check_names(names, seen)


def _check_names(names: Sequence[str], seen: set[str]) -> None:
    for name in names:
        if name not in seen:
            raise ValueError(f"remat: no block has {name!r}; {did_you_mean(name, seen)}")


@contextlib.contextmanager
def _recorded(names: Sequence[str]) -> Iterator[set[str]]:
    """Makes `names` the saved ones, and yields the set of the names that are seen inside."""
    outer, seen = _seen.get(), set[str]()
    tokens = _seen.set(seen), _saved.set(frozenset(names))
    try:
        yield seen
    finally:
        _seen.reset(tokens[0])
        _saved.reset(tokens[1])
        if outer is not None:
            outer |= seen
