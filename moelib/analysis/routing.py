"""Analyses of the routing logs of a run: numbers as JSON, plots, and a report.

Numbers that are not defined, such as those of a step without a log or of an expert without a token,
are null, and gaps in plots.

Letters: N tokens, B sequences, S sequence length, K experts per token, E experts.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moelib.analysis import routing_counts as counts
from moelib.analysis.placement import replay
from moelib.analysis.routing_counts import as_json
from moelib.core.errors import UserError
from moelib.runs.routing_file import DamagedLogError, RoutingLog, list_logs, log_folder
from moelib.runtime import storage
from moelib.runtime.files import write_json

logger = logging.getLogger(__name__)

Series = dict[str, dict[str, Any]]  # {analysis: {layer: numbers}}
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
    fields = [
        "config_hash",
        "vocab_size",
        "layers",
        "seq_len",
        "batch_size",
        "num_batches",
        "input",
    ]
    for log in logs[:-1]:
        for name in fields:
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
        numbers = _over_steps(logs, layer, token_ids, settings)
        numbers["replay"] = replay(
            logs.last, layer, settings.capacity_factors, settings.expert_parallel
        )
        for analysis, values in numbers.items():
            found.setdefault(analysis, {})[layer] = values
    return found


def _over_steps(
    logs: Logs, layer: str, token_ids: counts.Ids, settings: Settings
) -> dict[str, dict[str, Any]]:
    """Returns the numbers of a layer by analysis; lists over steps have null where no log is."""
    num_experts, top_k, _ = logs.last.sizes(layer)
    last = ids_of_tokens(logs.last, layer)
    experts = specialized(last, token_ids, num_experts, logs.last.header.vocab_size, settings)
    load: dict[str, list[Any]] = {name: [] for name in ("load", "max_violation", "dead_experts")}
    entropy: list[float | None] = []
    kept: dict[str, list[Any]] = {str(k): [] for k in sorted({1, 2, 4, top_k}) if k <= top_k}
    drift: dict[str, list[Any]] = {"changed": [], "load_shift": []}
    together: dict[str, Any] = {}
    traces: list[dict[str, list[Any]]] = [{"shares": []} for _ in experts["experts"]]
    before: tuple[counts.Ids, counts.Counts] | None = None
    shown = _shown(list(logs.logs))
    for step in logs.steps:
        if step not in logs.logs:
            for values in (*load.values(), entropy, *kept.values(), *drift.values()):
                values.append(None)
            for trace in traces:
                trace["shares"].append(None)
            before = None
            continue
        ids = last if logs.logs[step] is logs.last else ids_of_tokens(logs.logs[step], layer)
        per_expert = counts.load(ids, num_experts)
        load["load"].append(per_expert.tolist())
        load["max_violation"].append(as_json(counts.load_violation(per_expert)))
        load["dead_experts"].append(np.flatnonzero(per_expert == 0).tolist())
        entropy.append(_mean_entropy(logs.logs[step], layer))
        both, every = counts.overlap(ids, last, num_experts), counts.assignments(ids, num_experts)
        for k, values in kept.items():
            values.append(as_json(_share(both[int(k) - 1], every[int(k) - 1])))
        for name, value in _drift(before, (ids, per_expert), num_experts).items():
            drift[name].append(as_json(value))
        if step in shown:
            together[str(step)] = as_json(counts.conditional(counts.coactivation(ids, num_experts)))
        for expert, trace in zip(experts["experts"], traces, strict=True):
            trace["shares"].append(_shares_of(ids, token_ids, expert))
        before = ids, per_expert
    for expert, trace in zip(experts["experts"], traces, strict=True):
        expert["shares_by_step"] = trace["shares"]
    return {
        "load": {**load, "entropy": entropy},
        "saturation": kept,
        "coactivation": together,
        "specialization": experts,
        "drift": drift,
    }


def _shown(steps: Sequence[int]) -> set[int]:
    return {steps[round(i * (len(steps) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)}


def ids_of_tokens(log: RoutingLog, layer: str) -> counts.Ids:
    """Returns the expert ids [N, K] of the tokens of a log, padding excluded, in their order."""
    parts = [
        ids[mask] if not mask.all() else ids.reshape(-1, ids.shape[-1])
        for ids, mask in log.layer(layer, "expert_ids", "mask")
    ]
    return np.concatenate(parts)


def _mean_entropy(log: RoutingLog, layer: str) -> float | None:
    """Returns the mean entropy over tokens, nats."""
    total = num = 0.0
    for entropy, mask in log.layer(layer, "entropy", "mask"):
        total += float(entropy[mask].sum(dtype=np.float64))
        num += int(mask.sum())
    return as_json(total / num if num else math.nan)


def _drift(before: Any, now: Any, num_experts: int) -> dict[str, float]:
    """Returns the shares of assignments and of load that changed since the step before; or NaN."""
    if before is None:
        return {"changed": math.nan, "load_shift": math.nan}
    (old, old_load), (new, new_load) = before, now
    kept = _share(counts.overlap(old, new, num_experts)[-1], new_load.sum())
    loads = [x / max(x.sum(), 1) for x in (old_load, new_load)]
    return {"changed": 1 - kept, "load_shift": float(np.abs(loads[0] - loads[1]).sum() / 2)}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def specialized(
    ids: counts.Ids, token_ids: counts.Ids, num_experts: int, vocab_size: int, settings: Settings
) -> dict[str, Any]:
    """Returns the token ids with the largest shares of each expert, and a baseline.

    The baseline is the same statistic after a permutation of the assignments among tokens: what the
    selection of the largest share gives by chance, and by an uneven load.
    """
    size = {"min_count": settings.min_count}
    sizes = num_experts, vocab_size
    shares = counts.specialization(ids, token_ids, *sizes, **size)
    permuted = np.random.default_rng(settings.seed).permutation(len(ids))
    chance = counts.specialization(ids[permuted], token_ids, *sizes, **size)
    occurrences = counts.token_counts(token_ids, vocab_size)
    dead = counts.load(ids, num_experts) == 0
    experts: list[dict[str, Any]] = []
    for expert, best in enumerate(counts.best_tokens(shares, _NUM_BEST)):
        largest = [_largest(x[expert]) if not dead[expert] else None for x in (shares, chance)]
        named = [
            {"token": t, "count": int(occurrences[t]), "share": as_json(shares[expert, t])}
            for t in best
        ]
        experts.append({"expert": expert, "best": named, "share": largest[0], "chance": largest[1]})
    means = {
        name: as_json(_mean([each[name] for each in experts if each[name] is not None]))
        for name in ("share", "chance")
    }
    return {
        "min_count": settings.min_count,
        "token_ids": int((occurrences >= settings.min_count).sum()),
        "token_ids_too_rare": int(((occurrences > 0) & (occurrences < settings.min_count)).sum()),
        "token_ids_that_never_occur": int((occurrences == 0).sum()),
        "mean_share": means["share"],
        "mean_chance": means["chance"],
        "experts": experts,
    }


def _largest(shares: counts.Floats) -> float | None:
    defined = shares[~np.isnan(shares)]
    return float(defined.max()) if len(defined) else None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


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
    """Writes the numbers, plots and the report of a run into a folder; returns the files' names.

    Args:
        logs: The logs.
        found: The result of `analyze`.
        output: The folder.
        decode: Function from a token id to its text, for the report.
    """
    from moelib.analysis.routing_report import PLOTS, plot, report

    storage.make_folder(output)
    header = logs.last.header
    common = {
        "run": logs.run,
        "data": logs.data,
        "config_hash": header.config_hash,
        "steps": logs.steps,
        "missing": {str(step): reason for step, reason in logs.missing.items()},
        "reference_step": header.step,
    }
    names = []
    for analysis, layers in found.items():
        write_json(os.path.join(output, f"{analysis}.json"), {**common, "layers": layers}, indent=1)
        plot(os.path.join(output, f"{analysis}.svg"), analysis, logs.steps, layers)
        names += [f"{analysis}.json", f"{analysis}.svg"]
    assert set(found) <= set(PLOTS)
    path = os.path.join(output, "report.md")
    storage.write_bytes(path, report(logs, found, decode).encode())
    return [*names, "report.md"]
