"""One program for all schedules: forward and backward passes of stages, inside `jax.shard_map`.

Each rank runs the branch of `lax.switch` of its slot; activations and gradients go to other ranks
by `ppermute`. A stage keeps what its backward pass reads of the forward pass, less if it recomputes
blocks. Other mesh axes stay automatic: the functions may use them as without a pipeline.
"""

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moelib.core.tree import count_bytes
from moelib.parallel.pipeline.buffers import entries, read, write
from moelib.parallel.pipeline.pair import in_one_loop
from moelib.parallel.pipeline.passes import Passes, split_passes
from moelib.parallel.pipeline.schedule import Pass, Schedule, Slot
from moelib.parallel.pipeline.ticks import Ticks, Transfer, kept_over_1f1b, ticks_of

logger = logging.getLogger(__name__)

AXIS = "pipeline"
SLOTS = "pipeline_slots"  # Scope of the slots' branches in a compiled program.
MOST_OVER_1F1B = 1.5  # Bytes kept between passes, over those of 1F1B, above which one is told.
ENDS = "pipeline_ends"  # Scope of what only the first or the last stage computes, inside of them.


class Layout(NamedTuple):
    """The stages of a model: which layers each of them has."""

    schedule: Schedule
    num_ranks: int
    sizes: tuple[int, ...]  # Layers of each stage.

    @property
    def rows(self) -> list[list[int]]:
        """The layers of each chunk, those of rank 0 first; -1 fills up to the largest stage."""
        first = np.cumsum([0, *self.sizes])
        order = [
            self.schedule.stage(self.num_ranks, rank, chunk)
            for rank in range(self.num_ranks)
            for chunk in range(self.schedule.num_chunks)
        ]
        width = max(self.sizes)
        return [[*range(first[s], first[s + 1]), *[-1] * (width - self.sizes[s])] for s in order]


class Functions(NamedTuple):
    """A model in three parts, as functions of one micro-batch.

    A micro-batch is a tree of arrays, the slices of `microbatches`. Outputs are trees of arrays.
    """

    # (outer, beginning, constants, micro) -> ((x, auxiliary loss), (outputs, beginning)): before
    # the layers.
    first: Callable[..., Any]
    # (params, x, fixed, constants, micro, layers) -> ((x, auxiliary loss), (outputs, fixed)): the
    # layers of one stage; `layers` is its part of those of `run_pipeline`.
    stage: Callable[..., Any]
    # (outer, x, ending, constants, micro) -> (loss, (outputs, ending)): after the layers.
    last: Callable[..., Any]


class Result(NamedTuple):
    """Sums over all micro-batches, and the outputs of each."""

    params: Any  # Gradients of stages [chunks of all ranks, layers, ...], float32.
    outer: Any  # Gradients of parameters outside of stages, float32.
    fixed: Any  # Parameters of stages without gradient, after the last micro-batch.
    beginning: Any  # Parameters that `first` updates, after the last micro-batch.
    ending: Any  # Parameters that `last` updates, after the last micro-batch.
    stages: Any  # Outputs of stages [chunks of all ranks, M, ...].
    first: Any  # Outputs [M, ...].
    last: Any  # Outputs [M, ...].


def run_pipeline(
    functions: Functions,
    layout: Layout,
    params: Any,
    fixed: Any,
    outer: Any,
    beginning: Any,
    ending: Any,
    constants: Any,
    microbatches: Any,
    *,
    layers: Any = None,
    uniform: bool = False,
) -> Result:
    """Returns gradients and outputs of a step, in a mesh with the axis "pipeline".

    Args:
        functions: The model; the losses that they return are already weighted.
        layout: Its stages.
        params: Parameters of stages, arrays [chunks of all ranks, layers, ...] in the order of
            `layout.rows`.
        fixed: Parameters of stages without gradient.
        outer: Parameters outside of stages that have gradients.
        beginning: Parameters without gradient that `first` updates.
        ending: Those that `last` updates.
        constants: Tree of arrays that every function gets.
        microbatches: Tree of arrays [M, ...].
        layers: Arrays of stages that are only read, as `params`; by default `layout.rows`.
        uniform: Whether all ranks compute the slots of all, and keep the results of their own.
            Permutes of XLA for CPUs wait for all devices, and hang in a branch that some take:
            those of ring attention (axis "seq"), and of values that move between the axes
            "expert" and "model". Other collectives wait for their own group only.
    """
    num = jax.tree.leaves(microbatches)[0].shape[0]
    ticks = ticks_of(layout.schedule, layout.num_ranks, num)
    of_rank, whole = jax.P(AXIS), jax.P()
    run = functools.partial(_Run, functions, layout, ticks, uniform)
    mapped = jax.shard_map(
        lambda *args: run(*args).all_ticks(),
        in_specs=(of_rank, of_rank, whole, whole, whole, whole, whole, of_rank),
        out_specs=Result(of_rank, whole, of_rank, whole, whole, of_rank, whole, whole),
        axis_names={AXIS},
        check_vma=False,
    )
    layers = np.array(layout.rows, np.int32) if layers is None else layers
    return mapped(params, fixed, outer, beginning, ending, constants, microbatches, layers)


class _State(NamedTuple):
    """The buffers and sums of a rank between ticks; V chunks."""

    inputs: jax.Array  # [V, num_inputs, ...]
    output_gradients: jax.Array  # [V, num_gradients, ...]
    fixed: Any  # [V, layers, ...]
    beginning: Any
    ending: Any
    saved: Any  # [num_saved, ...]
    deferred: Any  # [num_deferred, ...]
    gradients: Any  # [V, layers, ...]
    outer: Any
    stages: Any  # [V, M, ...]
    first: Any  # Outputs, and `beginning` before each pass [M, ...].
    last: Any


class _Branch(NamedTuple):
    """The passes of a slot."""

    forward: bool
    backward: bool
    defers: bool  # Whether the backward pass leaves the gradient of weights for later.
    weights: bool


def branch_shares(layout: Layout, num_microbatches: int) -> list[float]:
    """Returns the shares of ticks in which the mean rank runs each branch of a compiled slot."""
    ticks = ticks_of(layout.schedule, layout.num_ranks, num_microbatches)
    runs = collections.Counter(_branch(slot) for row in ticks.slots for slot in row)
    return [runs[each] / runs.total() for each in sorted(runs)]


def _branch(slot: Slot) -> _Branch:
    kinds = {task.kind for task in slot}
    defers = Pass.INPUT_GRADIENT in kinds
    return _Branch(
        forward=Pass.FORWARD in kinds,
        backward=defers or Pass.BACKWARD in kinds,
        defers=defers,
        weights=Pass.WEIGHT_GRADIENT in kinds,
    )


# A pass of a stage, and a function of (state, its results) that returns (state, what to send).
_Pass = Callable[[], Any]
_End = Callable[[_State, Any], tuple[_State, Any]]


class _Run:
    """The program of one rank, inside of shard_map."""

    def __init__(
        self,
        functions: Functions,
        layout: Layout,
        ticks: Ticks,
        uniform: bool,
        params: Any,
        fixed: Any,
        outer: Any,
        beginning: Any,
        ending: Any,
        constants: Any,
        microbatches: Any,
        layers: Any,
    ) -> None:
        functions = Functions(*map(jax.jit, functions))  # Traced once for all branches.
        self.functions = functions
        self.layout = layout
        self.ticks = ticks
        self.uniform = uniform
        self.params = params
        self.outer = outer
        self.constants = constants
        self.microbatches = microbatches
        self.layers = layers
        self.rank = lax.axis_index(AXIS)
        ranks, chunks = range(layout.num_ranks), range(layout.schedule.num_chunks)
        stages = [[layout.schedule.stage(layout.num_ranks, r, c) for c in chunks] for r in ranks]
        self.stages = jnp.array(stages)[self.rank]  # [V]

        def run_stage(params: Any, x: Any, fixed: Any, same: Any) -> Any:
            return functions.stage(params, x, fixed, *same)

        first_of = functools.partial(jax.tree.map, lambda a: a[0])
        micro = first_of(microbatches)
        (x, _), (first, _) = jax.eval_shape(functions.first, outer, beginning, constants, micro)
        stage = first_of(params), x, first_of(fixed), (constants, micro, first_of(layers))
        _, (outputs, _) = jax.eval_shape(run_stage, *stage)
        self.passes = split_passes(run_stage, *stage)
        _, (last, _) = jax.eval_shape(functions.last, outer, x, ending, constants, micro)
        M = jax.tree.leaves(microbatches)[0].shape[0]
        V = layout.schedule.num_chunks
        _warn_above_1f1b(layout, M, ticks, self.passes)
        self.nothing = _zeros(x)
        num_deferred = ticks.num_deferred + uniform  # One for backward passes that do not defer.
        self.start = _State(
            inputs=_zeros(x, V, ticks.num_inputs),
            output_gradients=_zeros(x, V, ticks.num_gradients),
            fixed=fixed,
            beginning=beginning,
            ending=ending,
            saved=_zeros(self.passes.saved, ticks.num_saved),
            deferred=_zeros(self.passes.deferred, num_deferred) if ticks.num_deferred else (),
            gradients=_zeros(params, dtype=jnp.float32),
            outer=_zeros(outer, dtype=jnp.float32),
            stages=_zeros(outputs, V, M),
            first=_zeros((first, beginning), M),
            last=_zeros(last, M),
        )

    def all_ticks(self) -> Result:
        """Returns this rank's part of the result."""
        state = self._scan()
        is_last = self.rank == (0 if self.layout.schedule.is_v else self.layout.num_ranks - 1)
        of = lambda is_own, tree: jax.tree.map(lambda a: jnp.where(is_own, a, 0), tree)
        return Result(
            params=state.gradients,
            outer=self._total(state.outer),
            fixed=state.fixed,
            beginning=self._total(of(self.rank == 0, state.beginning)),
            ending=self._total(of(is_last, state.ending)),
            stages=state.stages,
            first=self._total(state.first[0]),
            last=self._total(state.last),
        )

    def _total(self, tree: Any) -> Any:
        """Returns the sums over the ranks."""
        # XLA refuses a sum over one device.
        return tree if self.layout.num_ranks == 1 else lax.psum(tree, AXIS)

    def _scan(self) -> _State:
        n = self.layout.num_ranks
        of_slots = [list(map(_branch, row)) for row in self.ticks.slots]
        branches = sorted({each for row in of_slots for each in row})
        channels = sorted({each.channel(n) for row in self.ticks.transfers for each in row})
        arrivals = [
            [[each for each in row if each.channel(n) == channel] for channel in channels]
            for row in self.ticks.transfers
        ]
        rows = (
            np.array([[branches.index(each) for each in row] for row in of_slots]),
            np.stack([_task_table(self.ticks, row) for row in self.ticks.slots]),
            np.array([[_arrivals(group, n) for group in row] for row in arrivals]),
        )

        def tick(state: _State, row: Any) -> tuple[_State, None]:
            *slots, arriving = row
            state, sent = self._compute(state, branches, *slots)
            for channel, arrival in zip(channels, arriving, strict=True):
                state = self._deliver(state, sent, *channel, arrival)
            return state, None

        return lax.scan(tick, self.start, rows)[0]

    def _compute(self, state: _State, branches: Sequence[_Branch], index: Any, tasks: Any) -> Any:
        """Returns the state after a tick, and the results to send: (activation, gradient)."""
        index, tasks = index[self.rank], tasks[self.rank]
        if not self.uniform:
            run = [functools.partial(self._slot, each) for each in branches]
            # XLA copies whole buffers that branches read into a layout that one prefers. Reading
            # before them shortens the step of DUALPIPE_V, but not those of 1F1B and ZB-V.
            early = self.layout.schedule is Schedule.DUALPIPE_V
            saved = self._saved(state, tasks[1]) if early else None
            with jax.named_scope(SLOTS):
                return lax.switch(index, run, state, tasks, saved)
        # Each kind of pass once, for the ranks whose slots have it.
        y = dx = self.nothing
        is_any = _Branch(*map(any, zip(*branches, strict=True)))
        has_forward, has_backward, defers, has_weights = jnp.array(branches)[index]
        if is_any.forward:
            before, forward, end = self._forward(state, tasks[0])
            state, y = _select(has_forward, end(before, forward()), (state, y))
        if is_any.backward:
            saved, defer = self._saved(state, tasks[1]), self.ticks.num_deferred > 0
            backward, end = self._backward(state, tasks[1], saved, defer=defer)
            state, dx = _select(has_backward, end(state, backward()), (state, dx))
        if self.ticks.num_deferred:  # No slot has a backward pass and the weights of another.
            task = jnp.where(has_weights, tasks[2], tasks[1])
            now = has_weights | (has_backward & ~defers)
            state = _select(now, self._weights(state, task), state)
        return state, (y, dx)

    def _slot(self, branch: _Branch, state: _State, tasks: jax.Array, saved: Any) -> Any:
        y = dx = self.nothing
        forward = backward = lambda: None
        after_forward = after_backward = lambda state, results: (state, self.nothing)
        if branch.forward:
            state, forward, after_forward = self._forward(state, tasks[0])
        if branch.backward:
            if saved is None:
                saved = self._saved(state, tasks[1])
            backward, after_backward = self._backward(state, tasks[1], saved, defer=branch.defers)
        is_pair = branch.forward and branch.backward
        results = in_one_loop(forward, backward) if is_pair else (forward(), backward())
        state, y = after_forward(state, results[0])
        state, dx = after_backward(state, results[1])
        if branch.weights:
            state = self._weights(state, tasks[2])
        return state, (y, dx)

    def _if(
        self, condition: Any, run: Callable[..., tuple[Any, ...]], state: _State, *names: str
    ) -> _State:
        """Returns the state with new fields `run(*fields)` on the ranks where a condition is true.

        XLA would copy the fields that a branch returns as they are.
        """
        old = tuple(getattr(state, name) for name in names)
        if self.uniform:
            new = _select(condition, run(*old), old)
        else:
            with jax.named_scope(ENDS):
                new = lax.cond(condition, run, lambda *old: old, *old)
        return state._replace(**dict(zip(names, new, strict=True)))

    def _forward(self, state: _State, task: jax.Array) -> tuple[_State, _Pass, _End]:
        """Returns the state with the stage's input, and the pass."""
        chunk, m, saved_at, _ = task
        functions, micro, ring = (
            self.functions,
            _at(self.microbatches, m),
            m % self.ticks.num_inputs,
        )

        def first(inputs: jax.Array, before: Any, kept: Any) -> Any:
            (x, _), made = functions.first(self.outer, before, self.constants, micro)
            outputs, after = made
            return _put(inputs, x, chunk, ring), after, _put(kept, (outputs, before), m)

        changed = "inputs", "beginning", "first"
        state = self._if(self.stages[chunk] == 0, first, state, *changed)
        x, fixed = _at(state.inputs, chunk, ring), _at(state.fixed, chunk)
        stage = entries(self.params, chunk), x, fixed, self._same(chunk, m)
        into = entries(state.saved, saved_at)

        def end(state: _State, results: Any) -> Any:
            ((y, _), (outputs, new)), saved = results
            state = state._replace(
                saved=saved,
                fixed=_put(state.fixed, new, chunk),
                stages=_put(state.stages, outputs, chunk, m),
            )

            def last(output_gradients: jax.Array, total: Any, ending: Any, kept: Any) -> Any:
                def loss_of(outer: Any, y: Any) -> Any:
                    return functions.last(outer, y, ending, self.constants, micro)

                loss, vjp, (outputs, after) = jax.vjp(loss_of, self.outer, y, has_aux=True)
                outer, dy = vjp(jnp.ones_like(loss))
                gradients = _put(output_gradients, dy, chunk, m % self.ticks.num_gradients)
                return gradients, _add(total, outer), after, _put(kept, outputs, m)

            is_last = self.stages[chunk] == len(self.layout.sizes) - 1
            changed = "output_gradients", "outer", "ending", "last"
            return self._if(is_last, last, state, *changed), y

        return state, functools.partial(self.passes.forward, *stage, into), end

    def _same(self, chunk: Any, m: Any) -> Any:
        return self.constants, _at(self.microbatches, m), entries(self.layers, chunk)

    def _saved(self, state: _State, task: jax.Array) -> Any:
        """Returns what a backward pass reads of the forward pass."""
        return _at(state.saved, task[2])  # Not in its loop: XLA would copy whole buffers.

    def _backward(
        self, state: _State, task: jax.Array, saved: Any, *, defer: bool
    ) -> tuple[_Pass, _End]:
        chunk, m, _, deferred_at = task
        micro = _at(self.microbatches, m)
        dy = _at(state.output_gradients, chunk, m % self.ticks.num_gradients), jnp.ones(())
        if defer:
            run = self.passes.of_input
            name = "deferred"  # Field of the state that the pass writes.
            into = entries(state.deferred, deferred_at)
        else:
            run = self.passes.backward
            name = "gradients"
            into = self._sums(state, chunk)

        def end(state: _State, results: Any) -> Any:
            dx, written = results

            def first(total: Any) -> Any:
                before = _at(state.first[1], m)

                def input_of(outer: Any) -> Any:
                    return self.functions.first(outer, before, self.constants, micro)[0]

                (outer,) = jax.vjp(input_of, self.outer)[1]((dx, jnp.ones(())))
                return (_add(total, outer),)

            state = state._replace(**{name: written})
            return self._if(self.stages[chunk] == 0, first, state, "outer"), dx

        params, same = entries(self.params, chunk), self._same(chunk, m)
        return functools.partial(run, params, same, saved, dy, into), end

    def _weights(self, state: _State, task: jax.Array) -> _State:
        chunk, m, _, deferred_at = task
        params, same = entries(self.params, chunk), self._same(chunk, m)
        deferred = _at(state.deferred, deferred_at)
        _, sums = self.passes.of_weights(params, same, deferred, self._sums(state, chunk))
        return state._replace(gradients=sums)

    def _sums(self, state: _State, chunk: Any) -> Any:
        return entries(state.gradients, chunk, adds=True)

    def _deliver(
        self, state: _State, sent: Any, forward: bool, distance: int, table: jax.Array
    ) -> _State:
        """Returns the state after results went to ranks at a distance, as `_arrivals` tells."""
        n = self.layout.num_ranks
        if forward:
            x, name, length = sent[0], "inputs", self.ticks.num_inputs
        else:
            x, name, length = sent[1], "output_gradients", self.ticks.num_gradients
        if distance:
            x = lax.ppermute(x, AXIS, [(rank, (rank + distance) % n) for rank in range(n)])
        arrives, chunk, m = table[self.rank]
        buffer, index = getattr(state, name), (chunk, m % length)
        x = jnp.where(arrives > 0, x, _at(buffer, *index))
        return state._replace(**{name: _put(buffer, x, *index)})


def _warn_above_1f1b(layout: Layout, num_microbatches: int, ticks: Ticks, passes: Passes) -> None:
    """Logs a warning if deferred weight gradients make a schedule keep much more than 1F1B."""
    saved, deferred = (count_bytes(each) for each in (passes.saved, passes.deferred))
    if not ticks.num_deferred or not saved:
        return
    schedule, num_ranks = layout.schedule, layout.num_ranks
    times = kept_over_1f1b(schedule, num_ranks, num_microbatches, deferred / saved)
    if times > MOST_OVER_1F1B:
        logger.warning(
            "pipeline_schedule is %s, which keeps %.1f times as many bytes between passes as "
            "ONE_F_ONE_B: %.2f GiB per rank, over all its devices, of which %.2f GiB are for %d "
            "deferred gradients of weights. If memory is short, set ONE_F_ONE_B or INTERLEAVED.",
            schedule.name,
            times,
            (ticks.num_saved * saved + ticks.num_deferred * deferred) / 2**30,
            ticks.num_deferred * deferred / 2**30,
            ticks.num_deferred,
        )


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _task_table(ticks: Ticks, slots: Sequence[Slot]) -> np.ndarray:
    """Returns (chunk, micro-batch, index of its saved values, index of its deferred ones).

    It does so for each rank's forward pass, backward pass, and weight gradient.
    """
    table = np.zeros((len(slots), 3, 4), np.int32)
    columns = {Pass.FORWARD: 0, Pass.WEIGHT_GRADIENT: 2}
    for rank, slot in enumerate(slots):
        for task in slot:
            key = rank, task.chunk, task.microbatch
            at = ticks.saved[key], ticks.deferred.get(key, ticks.num_deferred)
            table[rank, columns.get(task.kind, 1)] = *key[1:], *at
    return table


def _arrivals(transfers: Sequence[Transfer], num_ranks: int) -> np.ndarray:
    """Returns (1 if something arrives, chunk, micro-batch) for each rank."""
    table = np.zeros((num_ranks, 3), np.int32)
    for each in transfers:
        table[each.target] = 1, each.chunk, each.microbatch
    return table


def _zeros(tree: Any, *dims: int, dtype: Any = None) -> Any:
    """Returns zeros of the shapes of a tree, with leading dimensions."""
    return jax.tree.map(lambda a: jnp.zeros((*dims, *a.shape), dtype or a.dtype), tree)


def _at(tree: Any, *index: Any) -> Any:
    return read(entries(tree, *index))


def _put(tree: Any, values: Any, *index: Any) -> Any:
    return write(entries(tree, *index), values)


def _add(total: Any, new: Any) -> Any:
    return jax.tree.map(lambda sum, x: sum + x.astype(sum.dtype), total, new)
