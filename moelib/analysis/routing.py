"""Analyses of the routing logs of a run: numbers as JSON, plots, and a report.

Numbers that are not defined, such as those of a step without a log or of an expert without a token,
are null, and gaps in plots.

Letters: N tokens, B sequences, S sequence length, K experts per token, E experts.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moelib.analysis import routing_counts as counts
from moelib.analysis.placement import replay
from moelib.analysis.report import write_files
from moelib.analysis.routing_counts import as_json
from moelib.core.errors import UserError
from moelib.runs.routing_file import DamagedLogError, RoutingLog, list_logs, log_folder

logger = logging.getLogger(__name__)

Series = dict[str, dict[str, Any]]  # {analysis: {layer: numbers}}
# Fields of the headers in which comparable logs are equal.
_COMPARED = "config_hash", "vocab_size", "layers", "seq_len", "batch_size", "num_batches", "input"
_SHOWN = 3  # Steps whose co-activation is kept: the first, the middle, the last.
_NUM_BEST = 2  # Token ids that stand for an expert.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the analyses."""

    min_count: int = 100  # Occurrences from which a token id has a share.
    seed: int = 0  # Of the permutation baseline.
    capacity_factors: Sequence[float] = (1.0, 1.25, 1.5, 2.0)  # Whose drops are predicted.
    expert_parallel: Sequence[int] = (2, 4, 8)  # Devices that share the experts in the replay.


@dataclasses.dataclass(frozen=True)
class Logs:
    """The logs of a run that can be compared, and the steps without one."""

    run: str
    data: str
    logs: dict[int, RoutingLog]  # By step, ascending.
    missing: dict[int, str]  # Reason by step.

    @property
    def steps(self) -> list[int]:
        """All steps, those without a log too."""
        return sorted([*self.logs, *self.missing])

    @property
    def last(self) -> RoutingLog:
        """The log of the last step."""
        return self.logs[max(self.logs)]


def open_logs(
    run: str,
    data: str,
    *,
    steps: Sequence[int] | None = None,
    expected: Sequence[int] = (),
    missing: Mapping[int, str] | None = None,
) -> Logs:
    """Returns the logs of a run, once they are known to be of one config and of the same tokens.

    Args:
        run: Folder of the run.
        data: Name of the data.
        steps: Steps to read; None for all.
        expected: Further steps that should have a log.
        missing: Reasons, by step, for which there is no log.

    Raises:
        UserError: If there is no complete log, or two logs differ in what they are of.
    """
    found = list_logs(run, data)
    wanted = sorted({*found, *expected, *(missing or {})} if steps is None else steps)
    reasons = dict(missing or {})
    logs: dict[int, RoutingLog] = {}
    for step in wanted:
        if step not in found:
            reasons.setdefault(step, "there is neither a log nor a checkpoint.")
            continue
        try:
            logs[step] = RoutingLog(log_folder(run, data, step))
        except DamagedLogError as error:
            reasons.setdefault(step, str(error))
        else:
            reasons.pop(step, None)
    for step, reason in sorted(reasons.items()):
        logger.warning("Step %d is missing: %s", step, reason)
    if not logs:
        listed = "; ".join(f"step {step}: {reason}" for step, reason in reasons.items())
        complete = ", ".join(str(step) for step, whole in found.items() if whole)
        raise UserError(
            f"{run}: no step has a complete routing log of {data!r}; steps with one: "
            f"{complete or 'none'}; {listed}"
        )
    result = Logs(run, data, logs, dict(sorted(reasons.items())))
    check_comparable(list(logs.values()))
    return result


def check_comparable(logs: Sequence[RoutingLog]) -> None:
    """Checks that logs are of one config, one vocabulary and the same tokens.

    Raises:
        UserError: If not; names the field and both values.
    """
    first = logs[-1]
    for log in logs[:-1]:
        for name in _COMPARED:
            was, now = (getattr(each.header, name) for each in (log, first))
            if was != now:
                cure = "select steps (--steps), or remove the other logs"
                if name == "num_batches":
                    cure += f", or set --max_batches={was} to write that of the checkpoint again"
                raise UserError(
                    f"{log.folder}: {name} is {was!s:.200}, and {now!s:.200} in {first.folder}; "
                    f"compare logs of one config and the same batches: {cure}."
                )
        for batch, pair in enumerate(zip(log.tokens(), first.tokens(), strict=True)):
            if not all(np.array_equal(a, b) for a, b in zip(*pair, strict=True)):
                raise UserError(
                    f"{log.folder}: input_ids of batch {batch} are not those in {first.folder}; "
                    "remove the log of the other data."
                )


# -- Numbers -------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """The routing of a layer's tokens at a step, padding excluded."""

    ids: counts.Ids  # Expert ids [N, K].
    load: counts.Counts  # Assignments to each expert [E].
    entropy: float | None  # Mean over tokens, nats.


def routed(log: RoutingLog, layer: str) -> Routed:
    """Returns the routing of the tokens of a log, in their order."""
    parts, entropy = [], 0.0
    for ids, entropies, mask in log.layer(layer, "expert_ids", "entropy", "mask"):
        parts.append(ids[mask] if not mask.all() else ids.reshape(-1, ids.shape[-1]))
        entropy += float(entropies[mask].sum(dtype=np.float64))
    ids = np.concatenate(parts)
    return Routed(ids, counts.load(ids, log.sizes(layer).num_experts), _share(entropy, len(ids)))


def _load(now: Routed, before: Routed | None, last: Routed) -> dict[str, Any]:
    del before, last
    return {
        "load": now.load.tolist(),
        "max_violation": as_json(counts.load_violation(now.load)),
        "dead_experts": np.flatnonzero(now.load == 0).tolist(),
        "entropy": now.entropy,
    }


def _saturation(now: Routed, before: Routed | None, last: Routed) -> dict[str, Any]:
    """Returns the shares of the k best experts that are among those of the last step, by k."""
    del before
    top_k, num_experts = now.ids.shape[1], len(now.load)
    both = counts.overlap(now.ids, last.ids, num_experts)
    every = counts.assignments(now.ids, num_experts)
    return {
        str(k): _share(both[k - 1], every[k - 1]) for k in sorted({1, 2, 4, top_k}) if k <= top_k
    }


def _drift(now: Routed, before: Routed | None, last: Routed) -> dict[str, Any]:
    """Returns the shares of assignments and of load that changed since the step before."""
    del last
    if before is None:
        return {"changed": None, "load_shift": None}
    kept = counts.overlap(before.ids, now.ids, len(now.load))[-1]
    num = int(now.load.sum())
    old, new = (x.load / max(x.load.sum(), 1) for x in (before, now))
    return {"changed": _share(num - kept, num), "load_shift": as_json(np.abs(old - new).sum() / 2)}


# Analyses of one step, given the step before, if it has a log, and the last one.
_OF_A_STEP = {"load": _load, "saturation": _saturation, "drift": _drift}


def analyze(
    logs: Logs, settings: Settings | None = None, on_layer: Callable[[str], None] = lambda _: None
) -> Series:
    """Returns the numbers of all analyses, {analysis: {layer: numbers}}, as JSON values.

    Args:
        logs: The logs.
        settings: What to compute; None for the defaults.
        on_layer: Function called with each layer before it is read.

    Raises:
        UserError: If all tokens are padding.
    """
    settings = settings or Settings()
    token_ids = np.concatenate([ids[mask] for ids, mask in logs.last.tokens()])
    if not len(token_ids):
        raise UserError(f"{logs.last.folder}: all tokens are padding; log an input with text.")
    found: Series = {}
    for layer in logs.last.layers:
        on_layer(layer)
        for analysis, numbers in _of_layer(logs, layer, token_ids, settings).items():
            found.setdefault(analysis, {})[layer] = numbers
    return found


def _of_layer(
    logs: Logs, layer: str, token_ids: counts.Ids, settings: Settings
) -> dict[str, dict[str, Any]]:
    """Returns the numbers of a layer by analysis; lists over steps have null where no log is."""
    last, before = routed(logs.last, layer), None
    experts = specialized(last, token_ids, logs.last.header.vocab_size, settings)
    rows = {name: dict[int, dict[str, Any]]() for name in (*_OF_A_STEP, "specialization")}
    together, shown = {}, _shown(list(logs.logs))
    for step in logs.steps:
        if (log := logs.logs.get(step)) is None:
            before = None
            continue
        now = last if log is logs.last else routed(log, layer)
        for name, numbers_of in _OF_A_STEP.items():
            rows[name][step] = numbers_of(now, before, last)
        rows["specialization"][step] = {
            each["expert"]: _shares_of(now.ids, token_ids, each) for each in experts["experts"]
        }
        if step in shown:
            pairs = counts.coactivation(now.ids, len(now.load))
            together[str(step)] = as_json(counts.conditional(pairs))
        before = now
    series = {name: _over_steps(of_step, logs.steps) for name, of_step in rows.items()}
    shares = series.pop("specialization")
    for each in experts["experts"]:
        each["shares_by_step"] = shares[each["expert"]]
    sizes = settings.capacity_factors, settings.expert_parallel
    return {
        "load": series["load"],
        "saturation": series["saturation"],
        "coactivation": together,
        "specialization": experts,
        "drift": series["drift"],
        "replay": replay(logs.last, layer, *sizes),
    }


def _over_steps(rows: Mapping[int, Mapping[Any, Any]], steps: Sequence[int]) -> dict[Any, Any]:
    """Returns {name: values at all steps} of {step: {name: value}}; null at steps without a row."""
    names = next(iter(rows.values()))
    return {name: [rows[x][name] if x in rows else None for x in steps] for name in names}


def _shown(steps: Sequence[int]) -> set[int]:
    return {steps[round(i * (len(steps) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)}


def _share(part: float, whole: int) -> float | None:
    return as_json(part / whole) if whole else None


def specialized(
    last: Routed, token_ids: counts.Ids, vocab_size: int, settings: Settings
) -> dict[str, Any]:
    """Returns the token ids with the largest shares of each expert, and a baseline.

    The baseline is the same statistic after a permutation of the assignments among tokens: what the
    selection of the largest share gives by chance, and by an uneven load.
    """
    shares_of = lambda ids: counts.specialization(
        ids, token_ids, len(last.load), vocab_size, min_count=settings.min_count
    )
    shares = shares_of(last.ids)
    chance = shares_of(np.random.default_rng(settings.seed).permutation(last.ids))
    occurrences = counts.token_counts(token_ids, vocab_size)
    experts: list[dict[str, Any]] = []
    for expert, best in enumerate(counts.best_tokens(shares, _NUM_BEST)):
        named = [
            {"token": t, "count": int(occurrences[t]), "share": as_json(shares[expert, t])}
            for t in best
        ]
        largest = {
            name: _largest(x[expert]) if last.load[expert] else None
            for name, x in (("share", shares), ("chance", chance))
        }
        experts.append({"expert": expert, "best": named, **largest})
    known = {x: [each[x] for each in experts if each[x] is not None] for x in ("share", "chance")}
    return {
        "min_count": settings.min_count,
        "token_ids": int((occurrences >= settings.min_count).sum()),
        "token_ids_too_rare": int(((occurrences > 0) & (occurrences < settings.min_count)).sum()),
        "token_ids_that_never_occur": int((occurrences == 0).sum()),
        **{
            f"mean_{x}": as_json(np.mean(values)) if values else None for x, values in known.items()
        },
        "experts": experts,
    }


def _largest(shares: counts.Floats) -> float | None:
    defined = shares[~np.isnan(shares)]
    return float(defined.max()) if len(defined) else None


def _shares_of(ids: counts.Ids, token_ids: counts.Ids, expert: dict[str, Any]) -> list[float]:
    """Returns the shares, at a step, of the token ids that are an expert's best at the last."""
    found = []
    for each in expert["best"]:
        rows = ids[token_ids == each["token"]]
        found.append(float((rows == expert["expert"]).sum() / len(rows)))
    return found


# -- Files ---------------------------------------------------------------------------------------


def write_analysis(
    logs: Logs, found: Series, output: str, decode: Callable[[int], str] | None = None
) -> list[str]:
    """Writes the numbers, plots and the report of a run into a folder; returns the files' paths.

    Args:
        logs: The logs.
        found: The result of `analyze`.
        output: The folder.
        decode: Function from a token id to its text, for the report.
    """
    from moelib.analysis.routing_report import plot, report

    header = logs.last.header
    common = {
        "run": logs.run,
        "data": logs.data,
        "config_hash": header.config_hash,
        "steps": logs.steps,
        "missing": {str(step): reason for step, reason in logs.missing.items()},
        "reference_step": header.step,
    }
    parts = {
        analysis: ({**common, "layers": layers}, plot(analysis, logs.steps, layers))
        for analysis, layers in found.items()
    }
    return write_files(output, parts, report(logs, found, decode))
