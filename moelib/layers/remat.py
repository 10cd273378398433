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

# Those of `jax.checkpoint_policies` that are policies themselves; the others there make one.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)

_ROUTING = "routing"

_seen: ContextVar[set[str] | None] = ContextVar("moelib_keep_points", default=None)
_kept: ContextVar[frozenset[str]] = ContextVar("moelib_kept", default=frozenset())


def save_activation(x: jax.Array, name: str) -> jax.Array:
    """Returns x, which `remat` may keep by this name."""
    seen = _seen.get()
    if seen is not None:
        seen.add(name)
    return checkpoint_name(x, name)


def save_routing(x: Any) -> Any:
    """Returns arrays that say where tokens go; `remat` keeps them whatever it is told."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _ROUTING), x)


def keeps(name: str) -> bool:
    """Returns whether the block that is traced keeps or offloads the point of this name.

    A layer that asks need not make the point itself: something in it has that name.
    """
    seen = _seen.get()
    if seen is not None:
        seen.add(name)
    return name in _kept.get()


def remat(
    policy: str | None = None,
    prevent_cse: bool = False,
    keep: Sequence[str] = (),
    offload: Sequence[str] = (),
) -> Callable[[Callable], Callable]:
    """Returns a wrapper that recomputes a block in the backward pass instead of storing it.

    Args:
        policy: What is stored all the same, one of REMAT_POLICIES; None stores the block's input,
            and what `keep` and `offload` name.
        prevent_cse: Needed outside of a scan, or the compiler undoes it; a LoopStack sets it.
        keep: Names of `save_activation`s that are stored on the device.
        offload: Names of `save_activation`s that are stored in the host's memory meanwhile.

    Raises:
        ValueError: If there is no such policy, or it is given beside names; and, when the block is
            traced, if it has no point of a name.
    """
    if policy is not None and policy not in REMAT_POLICIES:
        raise ValueError(
            f"remat policy {policy!r} is unknown; {did_you_mean(policy, REMAT_POLICIES)}"
        )
    names = (*keep, *offload)
    if policy is not None and names:
        raise ValueError(
            f"remat: policy is {policy!r} and {', '.join(names)} are named; set the one or the "
            "other."
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
    """Returns fn, which raises ValueError when it is traced and lacks a point of these names."""
    if not names:
        return fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _recorded(names) as seen:
            result = fn(*args, **kwargs)
        for name in names:
            if name not in seen:
                raise ValueError(f"remat: the block has no {name!r}; {did_you_mean(name, seen)}")
        return result

    return run


@contextlib.contextmanager
def _recorded(names: Sequence[str]) -> Iterator[set[str]]:
    outer, seen = _seen.get(), set[str]()
    tokens = _seen.set(seen), _kept.set(frozenset(names))
    try:
        yield seen
    finally:
        _seen.reset(tokens[0])
        _kept.reset(tokens[1])
        if outer is not None:
            outer |= seen
