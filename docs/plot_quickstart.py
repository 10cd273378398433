"""Plots the losses of a run: python docs/plot_quickstart.py runs/quickstart/run IMAGE.svg."""

import json
import pathlib
import sys

import matplotlib.pyplot as plt


def plot(trainer_dir: str, image: str) -> None:
    """Writes a picture of the training and validation loss over steps.

    Args:
        trainer_dir: Folder of the run.
        image: Path of the picture, whose ending gives the format.
    """
    lines = pathlib.Path(trainer_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    styles = {"training": ("loss", "-"), "validation": ("validation/loss", "o")}
    for label, (metric, style) in styles.items():
        points = [(each["step"], each[metric]) for each in records if metric in each]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, metadata={"Date": None})


if __name__ == "__main__":
    plot(*sys.argv[1:])
