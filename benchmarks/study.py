"""A study on two CPU cores: `python -m benchmarks.study`.

Six Mixture-of-Experts models at three budgets, and their dense twins of equal FLOPs, learn from
English text of Debian packages. Each run is a `moelib train` of its own. A command that is started
again skips finished runs and resumes the one that was interrupted. Losses over time are those of
steps that are measured side by side, whatever else the machine does during the runs. At the end,
losses, scaling laws and comparisons of twins are written into a page, from the files of the runs.

    python -m benchmarks.study --estimate              # measure a step of each model, and multiply
    python -m benchmarks.study                         # fetch, train, analyze, write
    python -m benchmarks.study --scale=10              # ten times the FLOPs of every run
"""

import dataclasses
import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.errors import UsageError, UserError
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.figures import save_figure
from moelib.runtime.progress import format_seconds
from moelib.runtime.storage import atomic_file, read_json, read_text, write_json
from moelib.runtime.table import Table, print_table, to_markdown

# English text in packages of Debian: a dictionary, glosses, two encyclopedias of computing.
PACKAGES = {
    "dict-gcide": ["usr/share/dictd/gcide.dict.dz"],
    "wordnet-base": [f"usr/share/wordnet/data.{x}" for x in ("noun", "verb", "adj", "adv")],
    "dict-foldoc": ["usr/share/dictd/foldoc.dict.dz"],
    "jargon-text": ["usr/share/doc/jargon-text/jargon.txt.gz"],
}
VOCAB_SIZE = 1024  # With a larger one, most FLOPs would be those of the output head.
SEQ_LEN, BATCH_SIZE = 128, 4
BUDGETS = (0.85e12, 1.7e12, 2.7e12)  # FLOPs of a run at --scale=1.
KINDS = ("moe", "dense")
METRIC = "validation/cross_entropy"
_BEGIN, _END = "<!-- results of benchmarks.study -->", "<!-- end of the results -->"


class Size(NamedTuple):
    """Width and number of layers, the first of which is dense."""

    dim: int
    num_layers: int


SIZES = [Size(*x) for x in ((24, 2), (32, 3), (48, 3), (64, 4), (96, 4), (128, 4))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the study."""

    output: str = flag("runs/study", "Folder of the text, the runs and the analyses.")
    scale: float = flag(1.0, "Factor of the FLOPs of all runs.", lower_bound=0.0)
    num_sizes: int = flag(len(SIZES), "Number of models, from the smallest.", lower_bound=1)
    text: str | None = flag(None, "File or folder of text to use instead of Debian packages.")
    estimate: bool = flag(False, "Measure a step of each model, print the time of all, and stop.")
    page: str | None = flag(
        None, "Page whose part between the comments of the study is replaced; in its folder, plots."
    )


# -- Configs -------------------------------------------------------------------------------------


def config(size: Size, kind: str) -> Any:
    """Returns the config of a model, 16 experts of which 2 are active, or of its dense twin."""
    from experiments import flame_moe
    from moelib.checkpoint.policy import evenly_spaced_policy
    from moelib.core.config import config_for_function
    from moelib.operations.dense_twin import dense_twin
    from moelib.train.routing_log import RoutingEvaler

    cfg = flame_moe.tiny()
    decoder = cfg.model.decoder
    cfg.model.set(dim=size.dim, vocab_size=VOCAB_SIZE)
    decoder.num_layers = size.num_layers
    for layer in (*decoder.first_layers, *decoder.block):
        layer.self_attention.num_heads = max(1, size.dim // 32)
    decoder.first_layers[0].feed_forward.hidden_dim = 3 * size.dim
    moe = decoder.block[0].feed_forward
    moe.hidden_dim = size.dim // 2
    moe.shared_experts.hidden_dim = size.dim
    evaler = cfg.evalers["validation"]
    cfg.input.set(seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, vocab_size=VOCAB_SIZE)
    evaler.input.set(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, max_batches=8)
    evaler.eval_policy = config_for_function(evenly_spaced_policy).set(num=10)
    assert cfg.checkpointer is not None
    cfg.checkpointer.set(save_policy=evaler.eval_policy.clone(), keep_last_n=1)
    cfg.summary_writer.formats = ["json_lines"]
    if kind == "dense":
        return dense_twin(cfg).config
    log = RoutingEvaler.default_config().set(evaler="validation")
    log.set(eval_policy=evaler.eval_policy.clone())
    return cfg.set(watchers={"routing_log": log})


def named_trainer_configs() -> Mapping[str, Callable[[], Any]]:
    """Returns the configs by name, such as "moe-64x4"."""
    names = {
        (size, kind): f"{kind}-{size.dim}x{size.num_layers}" for size in SIZES for kind in KINDS
    }
    return {name: lambda key=key: config(*key) for key, name in names.items()}


class Run(NamedTuple):
    """A run of the study."""

    name: str  # Of its folder.
    config: str  # Name of its config.
    budget: float  # FLOPs.
    steps: int


def runs(flags: Flags) -> list[Run]:
    """Returns all runs, each dense twin after its MoE run and with as many steps."""
    from moelib.analysis.isoflop import isoflop_grid
    from moelib.models.cost import model_cost

    configs = named_trainer_configs()
    sizes = [f"{size.dim}x{size.num_layers}" for size in SIZES[: flags.num_sizes]]
    flops = {}
    for size in sizes:
        model = configs[f"moe-{size}"]().model.clone(name="model").instantiate(parent=None)
        flops[size] = model_cost(model, seq_len=SEQ_LEN).train_flops_per_token
    budgets = [flags.scale * budget for budget in BUDGETS]
    grid = isoflop_grid(flops, budgets, tokens_per_step=BATCH_SIZE * SEQ_LEN)
    return [
        Run(f"{kind}-{x.size}-{x.budget:.3g}", f"{kind}-{x.size}", x.budget, x.steps)
        for x in grid
        for kind in KINDS
    ]


# -- Text and training ---------------------------------------------------------------------------


def fetch_text(folder: str) -> str:
    """Returns a folder with the text of the packages, which are fetched if it does not exist.

    Raises:
        UserError: If apt-get cannot fetch a package, or a package has other files.
    """
    if os.path.isdir(folder):
        return folder
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as temporary:
        made = os.path.join(temporary, "text")
        os.mkdir(made)
        for package, files in PACKAGES.items():
            _command(["apt-get", "download", package], cwd=temporary)
            (archive,) = pathlib.Path(temporary).glob(f"{package}_*.deb")
            unpacked = os.path.join(temporary, package)
            _command(["dpkg-deb", "-x", str(archive), unpacked])
            for file in files:
                _extract(os.path.join(unpacked, file), made, f"{package}-{os.path.basename(file)}")
        os.rename(made, folder)
    return folder


def _extract(path: str, folder: str, name: str) -> None:
    """Writes the text of a file, which may be compressed, as UTF-8."""
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{name}: the package has no such file; set --text to other text."
        ) from None
    data = gzip.decompress(data) if path.endswith((".dz", ".gz")) else data
    text = data.decode("utf-8", errors="replace")
    if name.startswith("wordnet"):  # A line per sense: numbers, a bar, and the gloss.
        text = "\n".join(line.partition("| ")[2].strip() for line in text.splitlines())
    with atomic_file(os.path.join(folder, f"{name}.txt")) as file:
        file.write(text)


def _command(command: Sequence[str], cwd: str | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{' '.join(command)}: {error}; set --text to a folder of text.") from error


def train(flags: Flags, planned: Sequence[Run]) -> list[str]:
    """Trains the runs that are not finished, one after another; returns those that fail.

    Raises:
        UserError: If a run is stopped.
    """
    from moelib.cli.quickstart import prepare_text

    store = os.path.join(flags.output, "data", "text")
    os.makedirs(os.path.dirname(store), exist_ok=True)
    if not os.path.exists(f"{store}.prepared"):
        text = flags.text or fetch_text(os.path.join(os.path.abspath(flags.output), "data", "raw"))
        prepare_text(text, store, VOCAB_SIZE)
        pathlib.Path(f"{store}.prepared").touch()
    failed = []
    for i, run in enumerate(planned):
        if is_finished(flags, run):
            continue
        print(f"study: run {i + 1} of {len(planned)}, {run.name}: {run.steps} steps", flush=True)
        command = [
            *(sys.executable, "-m", "moelib", "train", "--module=benchmarks.study"),
            *(f"--config={run.config}", f"--max_step={run.steps}"),
            *(f"--data_dir={os.path.dirname(store)}", f"--trainer_dir={_folder(flags, run)}"),
        ]
        if status := subprocess.run(command, check=False).returncode:
            failed.append(f"{' '.join(command)}: exit status {status}")
        elif not is_finished(flags, run):
            raise UserError(f"{run.name} was stopped; run the same command again to continue.")
    return failed


def _folder(flags: Flags, run: Run) -> str:
    return os.path.join(flags.output, "runs", run.name)


def is_finished(flags: Flags, run: Run) -> bool:
    """Returns whether a run has taken all of its steps."""
    from moelib.runs.metrics_file import read_metrics

    lines = read_metrics(_folder(flags, run), [METRIC])
    return any(line["step"] >= run.steps for line in lines if METRIC in line)


def step_seconds(flags: Flags, planned: Sequence[Run]) -> dict[str, float]:
    """Returns {config: seconds per step}, measured at the first call.

    A model and its twin are measured alternately, twice each; the lower of two medians counts.
    """
    from moelib.operations.time_twin import measured_step_seconds

    path = os.path.join(flags.output, "step_seconds.json")
    found: dict[str, float] = read_json(path)
    configs = named_trainer_configs()
    for moe in dict.fromkeys(run.config for run in planned[::2]):
        twins = [moe, moe.replace("moe", "dense")]
        if any(name not in found for name in twins):
            rounds = [
                [measured_step_seconds(configs[x](), num_steps=20) for x in twins] for _ in range(2)
            ]
            found |= dict(zip(twins, map(min, *rounds), strict=True))
            os.makedirs(flags.output, exist_ok=True)
            write_json(path, found)
    return {run.config: found[run.config] for run in planned}


def estimate(flags: Flags, planned: Sequence[Run]) -> Table:
    """Returns the time of all runs, from measured steps of each model, without evaluations."""
    rows, total = [], 0.0
    for name, seconds in step_seconds(flags, planned).items():
        steps = [run.steps for run in planned if run.config == name]
        total += seconds * sum(steps)
        time = format_seconds(seconds * sum(steps))
        rows.append([name, f"{1e3 * seconds:.1f}", " + ".join(f"{x:,}" for x in steps), time])
    rows += [[], ["all", "", "", format_seconds(total)]]
    return Table("Time of the study", ["config", "ms per step>", "steps>", "time>"], rows)


# -- Results -------------------------------------------------------------------------------------


def results(flags: Flags, planned: Sequence[Run]) -> Iterator[str]:
    """Yields the parts of the page in Markdown; plots are written into its folder.

    Runs that are not finished, or cannot be fitted, are named.
    """
    from moelib.analysis import twins
    from moelib.analysis.scaling_report import plot as plot_laws

    images = os.path.join(os.path.dirname(flags.page or os.path.join(flags.output, "x")), "images")
    os.makedirs(images, exist_ok=True)
    missing = [run for run in planned if not is_finished(flags, run)]
    if missing:
        yield f"Not finished, and not below: {', '.join(run.name for run in missing)}."
    pairs, seconds = [], step_seconds(flags, planned)
    for moe, dense in zip(planned[::2], planned[1::2], strict=True):
        if moe in missing or dense in missing:
            continue
        found = twins.compare_twins(
            [_folder(flags, moe), _folder(flags, dense)],
            METRIC,
            step_seconds=[seconds[moe.config], seconds[dense.config]],
        )
        twins.write_report(os.path.join(flags.output, "analysis", moe.name), found)
        pairs.append((moe, found))
    yield to_markdown(_models_table(planned, seconds))
    yield to_markdown(_pairs_table(pairs))
    if pairs:
        yield f"Best run of each budget:\n\n{to_markdown(_best_table(pairs))}"
        save_figure(_plot_pairs(pairs), os.path.join(images, "study_twins.svg"))
        yield "![Losses of all runs over FLOPs and over time](images/study_twins.svg)"
    for kind in KINDS:
        own = [run for run in planned if run.config.startswith(kind) and run not in missing]
        yield f"### Scaling laws of the {'MoE' if kind == 'moe' else kind} models"
        try:
            analysis, tables = _laws(flags, own, kind)
        except UserError as error:
            yield f"Not fitted: {error}"
            continue
        save_figure(plot_laws(analysis), os.path.join(images, f"study_{kind}.svg"))
        yield f"![Loss over parameters, best parameters over FLOPs](images/study_{kind}.svg)"
        for table in tables:
            yield f"{table.title}:\n\n{to_markdown(table)}"
    if pairs:
        yield from _routing(flags, min(pairs, key=lambda pair: pair[1].moe.loss)[0], images)


def _routing(flags: Flags, run: Run, images: str) -> Iterator[str]:
    """Yields the report of the routing of a run, with its plots."""
    from moelib.cli import analyze

    output = os.path.join(flags.output, "analysis", f"{run.name}-routing")
    analyze.run(analyze.Flags(trainer_dir=_folder(flags, run), output=output), ["routing"])
    yield f"### Routing of {run.config}, {run.budget:.3g} FLOPs"
    for plot in pathlib.Path(output).glob("*.svg"):
        shutil.copy(plot, os.path.join(images, f"study_routing_{plot.name}"))
    report = read_text(os.path.join(output, "report.md")).partition("\n")[2].strip()
    report = re.sub("^## ", "#### ", report, flags=re.MULTILINE)
    yield re.sub(r"\]\((\w+\.svg)\)", r"](images/study_routing_\1)", report)


def _laws(flags: Flags, own: Sequence[Run], kind: str) -> tuple[Any, list[Table]]:
    """Returns the scaling laws of the runs of a kind, and their tables; writes their report."""
    from moelib.analysis.scaling_laws import analyze
    from moelib.analysis.scaling_report import tables, write_report
    from moelib.analysis.training_runs import read_curve

    points = [read_curve(_folder(flags, run), METRIC).run for run in own]
    points = [dataclasses.replace(x, name=os.path.basename(x.name)) for x in points]
    analysis = analyze(points, [10 * max(run.budget for run in own)])
    write_report(os.path.join(flags.output, "analysis", kind), analysis, metric=METRIC)
    return analysis, tables(analysis)


def _models_table(planned: Sequence[Run], seconds: Mapping[str, float]) -> Table:
    """Returns the parameters, FLOPs and step times of all models."""
    from moelib.models.cost import model_cost

    rows = []
    for name in dict.fromkeys(run.config for run in planned):
        model = named_trainer_configs()[name]().model.clone(name="model").instantiate(parent=None)
        cost = model_cost(model, seq_len=SEQ_LEN)
        numbers = [cost.total_parameters, cost.active_parameters]
        numbers += [cost.active_non_embedding_parameters]
        flops = f"{cost.train_flops_per_token / 1e6:.2f}"
        rows.append([name, *(f"{x:,}" for x in numbers), flops, f"{1e3 * seconds[name]:.1f}"])
    active = ["active>", "active, without embeddings>"]
    return Table("Models", ["model", "parameters>", *active, "MFLOPs/token>", "ms/step>"], rows)


def _pairs_table(pairs: Sequence[tuple[Run, Any]]) -> Table:
    """Returns the final losses and times of all twins."""
    rows = []
    for run, x in pairs:
        moe, dense = x.curves
        seconds = [curve.seconds[-1] for curve in (moe, dense)]
        losses = [f"{x.moe.loss:.4f}", f"{x.dense.loss:.4f}", f"{x.moe.loss - x.dense.loss:+.4f}"]
        gain = "-" if x.equal_flops.gain is None else f"{x.equal_flops.gain:.2f}"
        size = [run.config.removeprefix("moe-"), f"{run.budget:.3g}", f"{x.moe.tokens / 1e6:.2f}"]
        times = [*map(format_seconds, seconds), f"{seconds[0] / seconds[1]:.2f}"]
        rows.append([*size, f"{run.steps:,}", *losses, gain, *times])
    gain_is = "FLOPs of the dense run over those of the MoE run at the same loss"
    notes = [
        f"Loss: `{METRIC}` at the end, nats per token. Gain: {gain_is}.",
        "Times: of the steps, measured side by side.",
    ]
    names = ["size", "FLOPs>", "M tokens>", "steps>", "MoE loss>", "dense loss>", "MoE - dense>"]
    more = ["gain>", "MoE time>", "dense time>", "MoE / dense time>"]
    return Table("MoE and dense twins", [*names, *more], rows, notes)


def _best_table(pairs: Sequence[tuple[Run, Any]]) -> Table:
    """Returns the best MoE and dense run of each budget."""
    rows = []
    for budget in dict.fromkeys(run.budget for run, _ in pairs):
        curves = [found.curves for run, found in pairs if run.budget == budget]
        moe, dense = (min(each, key=lambda x: x.losses[-1]) for each in zip(*curves, strict=True))
        cells = [f"{budget:.3g}"]
        for x in (moe, dense):
            cells += [os.path.basename(x.run.name).rpartition("-")[0], f"{x.losses[-1]:.4f}"]
        seconds = [x.seconds[-1] for x in (moe, dense)]
        change, ratio = moe.losses[-1] - dense.losses[-1], seconds[0] / seconds[1]
        rows.append([*cells, f"{change:+.4f}", *map(format_seconds, seconds), f"{ratio:.2f}"])
    columns = ["FLOPs>", "MoE", "loss>", "dense", "loss>", "MoE - dense>"]
    return Table("Best runs", [*columns, "MoE time>", "dense time>", "MoE / dense time>"], rows)


def _plot_pairs(pairs: Sequence[tuple[Run, Any]]) -> Any:
    """Returns all losses over FLOPs and over time; a line joins the best runs of the budgets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = (("flops", "training FLOPs"), ("seconds", "seconds of training steps"))
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        highest = 0.0
        for i, kind in enumerate(("MoE", "dense")):
            best: dict[float, tuple[float, float]] = {}  # {budget: (loss, spent)}
            for run, found in pairs:
                curve = found.curves[i]
                spent, losses = getattr(curve, name), curve.losses
                axes.plot(spent, losses, color=f"C{i}", lw=0.7, alpha=0.3)
                axes.plot(spent[-1], losses[-1], "o^"[i], color=f"C{i}", ms=4)
                end = losses[-1], spent[-1]
                best[run.budget] = min(best.get(run.budget, end), end)
                highest = max(highest, losses[-1])
            line = [(x, y) for y, x in best.values()]
            axes.plot(*zip(*line, strict=True), color=f"C{i}", lw=2, label=f"{kind}, best runs")
        axes.set(xlabel=label, ylabel="validation loss, nats per token", xscale="log")
        axes.set_ylim(top=highest + 0.1)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure


def write_page(page: str, parts: Sequence[str]) -> None:
    """Replaces what is between the comments of the study in a page, or makes the page.

    Raises:
        UserError: If the page lacks the comments.
    """
    text = read_text(page) if os.path.exists(page) else f"# Study\n\n{_BEGIN}\n{_END}\n"
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise UserError(f"--page={page}: it lacks the lines {_BEGIN} and {_END}; add them.")
    lines = "\n\n".join(parts).split("\n")
    is_text = lambda line: not line.startswith(("|", "!", "#"))
    lines = [textwrap.fill(x, 120, break_long_words=False) if is_text(x) else x for x in lines]
    with atomic_file(page) as file:
        file.write(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Fetches, trains, analyzes and writes; or estimates the time."""
    no_arguments(arguments, Flags)
    if not flags.scale > 0:
        raise UsageError(f"--scale={flags.scale}: set it above 0.")
    planned = runs(flags)
    if flags.estimate:
        print_table(estimate(flags, planned))
        return
    failed = train(flags, planned)
    if len(failed) < len(planned):
        page = flags.page or os.path.join(flags.output, "study.md")
        write_page(page, list(results(flags, planned)))
        print(f"wrote {page}")
    if failed:
        raise UserError(f"{len(failed)} of {len(planned)} runs failed: {'; '.join(failed)}.")


if __name__ == "__main__":
    sys.exit(run_command("study", Flags, run, sys.argv[1:], __doc__ or ""))
