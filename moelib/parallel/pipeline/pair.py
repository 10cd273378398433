"""A forward and a backward pass of different micro-batches as one program, layer by layer.

Each is a loop over layers, and compilers schedule one loop after the other. Here the two are one
loop, in whose body the all-to-all of one pass can run while the other computes. Source:
DeepSeek-V3, arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from moelib.core.jaxpr import bind, inlined, num_consts_and_carries

SCOPES = "first_of_pair", "second_of_pair"  # Scopes in the names of operations.


def in_one_loop(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns (first(), second()).

    The last scan of each, a loop over layers, is part of one loop if they are equally long.
    """
    both = [_Program(fn, scope) for fn, scope in zip((first, second), SCOPES, strict=True)]
    scans = [scan for program in both if (scan := program.last_scan())]
    lengths = {eqn.params["length"] for _, eqn in scans}
    if len(scans) < 2 or len(lengths) > 1 or 0 in lengths:
        return both[0].results(), both[1].results()
    for program, (index, _) in zip(both, scans, strict=True):
        program.run(index)
    loops = [_Loop(eqn, p.read(eqn.invars)) for p, (_, eqn) in zip(both, scans, strict=True)]

    def body(carries: Any, i: jax.Array) -> Any:
        after = []
        for loop, carry, scope in zip(loops, carries, SCOPES, strict=True):
            with jax.named_scope(scope):
                after.append(loop.iteration(carry, i))
        return after, None

    carries, _ = lax.scan(body, [x.start for x in loops], jnp.arange(loops[0].length))
    for program, loop, carry in zip(both, loops, carries, strict=True):
        program.skip(loop.results(carry))
    return both[0].results(), both[1].results()


class _Program:
    """The equations of a function without arguments, which are run in parts."""

    def __init__(self, fn: Callable[[], Any], scope: str) -> None:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)()
        flat = inlined(closed)
        self._jaxpr, self._structure = flat.jaxpr, jax.tree.structure(shape)
        self._values = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self._next, self._scope = 0, scope

    def last_scan(self) -> tuple[int, Any] | None:
        """Returns the last scan and its index."""
        found = [each for each in enumerate(self._jaxpr.eqns) if each[1].primitive.name == "scan"]
        return found[-1] if found else None

    def read(self, variables: Any) -> list[Any]:
        return [v.val if isinstance(v, Literal) else self._values[v] for v in variables]

    def run(self, end: int | None = None) -> None:
        """Runs the equations up to an index."""
        for eqn in self._jaxpr.eqns[self._next : end]:
            with jax.named_scope(self._scope):
                self.skip(bind(eqn, self.read(eqn.invars)))

    def skip(self, results: list[Any]) -> None:
        """Takes the results of the next equation."""
        self._values |= dict(zip(self._jaxpr.eqns[self._next].outvars, results, strict=True))
        self._next += 1

    def results(self) -> Any:
        """Returns the results, after all equations."""
        self.run()
        return jax.tree.unflatten(self._structure, self.read(self._jaxpr.outvars))


class _Loop:
    """A scan, one iteration at a time; its carry has the carries, and all stacked results."""

    def __init__(self, eqn: Any, operands: list[Any]) -> None:
        self.length, self._reverse = eqn.params["length"], eqn.params["reverse"]
        consts, num = num_consts_and_carries(eqn)
        self._body, self._num_carry = jaxpr_as_fun(eqn.params["jaxpr"]), num
        self._consts, self._xs = operands[:consts], operands[consts + num :]
        stacked = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num:]]
        self.start = operands[consts : consts + num], stacked

    def iteration(self, carry: Any, i: jax.Array) -> Any:
        carries, stacked = carry
        at = self.length - 1 - i if self._reverse else i
        results = self._body(*self._consts, *carries, *(x[at] for x in self._xs))
        num = self._num_carry
        made = [a.at[at].set(y) for a, y in zip(stacked, results[num:], strict=True)]
        return results[:num], made

    def results(self, carry: Any) -> list[Any]:
        return [*carry[0], *carry[1]]
