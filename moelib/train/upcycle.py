"""Upcycling: experts that begin as copies of a dense model's feed-forward layers.

Letters: E experts, K of them per token, G granularity, F hidden dimension of the dense layer, n
matrices up.
"""

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from moelib.core.config import Configurable, config_class
from moelib.core.config_types import Limit
from moelib.core.context import names_below
from moelib.core.errors import UserError
from moelib.layers.moe.router import Router
from moelib.models.model import Model

logger = logging.getLogger(__name__)

_EXPERTS = "/experts/"  # Before the names "up" and "down" of a layer's experts.


class Upcycle(Configurable):
    """Makes experts of the feed-forward layers of a dense model.

    Experts as wide as the dense layer are copies of it (sparse upcycling, Komatsuzaki et al.,
    arXiv:2212.05055). Those of width F / G are its G slices, in turn, with outputs multiplied by G;
    the router begins with equal weights for the slices of a copy, so that a token is sent to whole
    copies (virtual groups, He et al., arXiv:2410.07524). Outputs are divided by the router's
    `scaling_factor`. If the K weights of a token sum to 1 before it, K is a multiple of G, nothing
    is dropped and there are no shared experts, the model begins with the loss of the dense one.
    """

    @config_class
    class Config(Configurable.Config):
        # Part of each expert's hidden units that is drawn anew, with the mean and deviation of each
        # matrix, so that copies differ (Drop-Upcycling, Nakamura et al., arXiv:2502.19261, which
        # recommends 0.5). The loss then begins above that of the dense model.
        reinitialized: Annotated[float, Limit(">=", 0), Limit("<=", 1)] = 0.0
        seed: int = 0  # Of these units and their values.

    def dense_names(self, here: Collection[str], there: Collection[str]) -> dict[str, str]:
        """Returns {path of a parameter of experts: path that it has in a dense layer}.

        Args:
            here: Paths of the parameters of this run.
            there: Paths of those of the dense model, as they are named here.

        Raises:
            UserError: If no layer with experts is dense there.
        """
        found = {path: path.replace(_EXPERTS, "/") for path in here if _EXPERTS in path}
        found = {path: dense for path, dense in found.items() if dense in there}
        if not found:
            raise UserError(
                "init_from.upcycle is set, but no layer with experts is a dense one there; set it "
                "to None, or rename layers by init_from.rules."
            )
        return found

    def check_sizes(
        self, dense: Mapping[str, jax.ShapeDtypeStruct], own: Mapping[str, jax.Array]
    ) -> None:
        """Raises UserError if the sizes of dense layers do not fit; arguments as `experts`."""
        part = self.config.reinitialized
        for layer in _layers(dense):
            _granularity(layer, *([x[path] for path in _paths(layer)] for x in (dense, own)))
            width = own[_paths(layer)[1]].shape[-2]
            if part and not round(part * width):
                raise UserError(
                    f"init_from.upcycle.reinitialized is {part}, less than one of the {width} "
                    f"hidden units of an expert of {layer}; set it to {1 / width:.2g} or more, or "
                    "to 0."
                )

    def experts(
        self, dense: Mapping[str, jax.Array], own: Mapping[str, jax.Array], model: Model
    ) -> dict[str, jax.Array]:
        """Returns the experts, and routers that must fit them; deletes the initial experts.

        Args:
            dense: Arrays of the dense model, by the paths that experts have here.
            own: Parameters of this run, whose sizes must fit.
            model: The model of this run.
        """
        cfg: Upcycle.Config = self.config
        scales = {
            "/".join(names_below(model, each) or ()): each.config.scaling_factor
            for each, _ in model.walk()
            if isinstance(each, Router)
        }
        new: dict[str, jax.Array] = {}
        for number, layer in enumerate(_layers(dense)):
            paths = _paths(layer)
            initial = [own[path] for path in paths]
            granularity = _granularity(layer, [dense[path] for path in paths], initial)
            num_experts = initial[1].shape[-3]
            router = f"{layer.removesuffix('/experts')}/router"
            run = functools.partial(
                _experts,
                num_copies=num_experts // granularity,
                granularity=granularity,
                scale=granularity / scales[router],
                part=cfg.reinitialized,
            )
            key = jax.random.fold_in(jax.random.key(cfg.seed), number)
            shardings = tuple(x.sharding for x in initial)
            dtype = initial[0].dtype
            jax.tree.map(lambda x: x.delete(), initial)
            found = jax.jit(run, out_shardings=shardings)(*(dense[path] for path in paths), key)
            new |= {path: x.astype(dtype) for path, x in zip(paths, found, strict=True)}
            if granularity > 1:
                weight = own[path := f"{router}/weight"]
                group = functools.partial(_grouped, granularity=granularity)
                new[path] = jax.jit(group, out_shardings=weight.sharding)(weight)
            logger.info(
                "%s: %d experts are %d copies of a dense layer in %d parts.",
                *(layer, num_experts, num_experts // granularity, granularity),
            )
        return new


def sharding_of_dense(path: str, own: jax.Array) -> jax.sharding.NamedSharding:
    """Returns the sharding of a dense layer's array, that of experts without their dimension."""
    split = own.sharding
    assert isinstance(split, jax.sharding.NamedSharding)
    entries = [*split.spec, *[None] * (own.ndim - len(split.spec))]
    del entries[-4 if path.endswith("/up") else -3]  # [*l E n D f], [*l E f D]
    return jax.sharding.NamedSharding(split.mesh, jax.P(*entries))


def _layers(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition("/")[0] for path in paths})


def _paths(layer: str) -> tuple[str, str]:
    return f"{layer}/up", f"{layer}/down"


def _granularity(layer: str, dense: Sequence[Any], own: Sequence[Any]) -> int:
    """Returns the experts that a dense layer is divided into."""
    (_, down), (up_here, down_here) = dense, own
    *lead, num_experts, width, dim = down_here.shape
    granularity = max(down.shape[-2] // width, 1)
    wanted = [
        (*lead, up_here.shape[-3], dim, granularity * width),
        (*lead, granularity * width, dim),
    ]
    if [x.shape for x in dense] != wanted or num_experts % granularity:
        raise UserError(
            f"init_from.upcycle: {layer} has up {list(up_here.shape)} and down "
            f"{list(down_here.shape)}, and the dense layer {list(dense[0].shape)} and "
            f"{list(down.shape)}; set hidden_dim of the experts to that of the dense layer, or to "
            "a divisor of it such that num_experts is a multiple of their quotient."
        )
    return granularity


def _experts(
    up: Float[Array, "*l n D F"],
    down: Float[Array, "*l F D"],
    key: Key[Array, ""],
    *,
    num_copies: int,
    granularity: int,
    scale: float,
    part: float,
) -> tuple[Float[Array, "*l E n D f"], Float[Array, "*l E f D"]]:
    """Returns the matrices of E experts of the width f = F / G; `scale` multiplies outputs."""

    def copies(x: jax.Array, axis: int) -> jax.Array:
        slices = jnp.split(x, granularity, axis)
        return jnp.stack(slices * num_copies, axis=down.ndim - 2)  # Before the matrices of a layer.

    ups, downs = copies(up, -1), copies(scale * down, -2)
    if not part:
        return ups, downs
    keys = jax.random.split(key, 3)
    draws = jax.random.uniform(keys[0], downs.shape[:-1])  # [*l E f]
    rank = jnp.argsort(jnp.argsort(draws, axis=-1), axis=-1)
    is_new = rank < round(part * downs.shape[-2])

    def drawn(x: jax.Array, key: jax.Array) -> jax.Array:
        axes = (-2, -1)
        mean, deviation = jnp.mean(x, axes, keepdims=True), jnp.std(x, axes, keepdims=True)
        return mean + deviation * jax.random.normal(key, x.shape, x.dtype)

    ups = jnp.where(is_new[..., None, None, :], drawn(ups, keys[1]), ups)
    return ups, jnp.where(is_new[..., None], drawn(downs, keys[2]), downs)


def _grouped(router: Float[Array, "*l D E"], *, granularity: int) -> Float[Array, "*l D E"]:
    """Returns the router's weights, equal for the slices of a copy."""
    return jnp.repeat(router[..., ::granularity], granularity, axis=-1)
