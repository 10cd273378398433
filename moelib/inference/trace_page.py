"""A page of HTML that shows a trace: losses, experts and predictions of each token."""

import importlib.resources
import json
from typing import Any

import numpy as np

from moelib.inference.trace import Trace
from moelib.layers.tracing import EXPERT_IDS, EXPERT_WEIGHTS, ROUTER_PROBS


def trace_page(found: Trace, tokenizer: Any, *, title: str) -> str:
    """Returns the page of a trace.

    Args:
        found: A trace, with the arrays of experts and "hidden" where they are to be shown.
        tokenizer: The tokenizer of the traced model.
        title: Title of the page.
    """
    layers = [
        {"path": path, "num": arrays[ROUTER_PROBS].shape[-1], "experts": _experts(arrays)}
        for path, arrays in found.layers.items()
        if {EXPERT_IDS, EXPERT_WEIGHTS, ROUTER_PROBS} <= arrays.keys()
    ]
    norms = found.residual_norms
    predictions = []
    for path, (ids, probs) in found.predictions.items():
        if path not in norms:
            continue
        inside = [each["experts"] for each in layers if each["path"].startswith(path + ".")]
        best = [
            [[tokenizer.decode([i]), _short(p)] for i, p in zip(*of_token, strict=True)]
            for of_token in zip(ids.tolist(), probs.tolist(), strict=True)
        ]
        lengths = [_short(x) for x in norms[path].tolist()]
        experts = inside[0] if inside else None
        predictions.append({"path": path, "best": best, "norms": lengths, "experts": experts})
    losses = [_short(x) for x in found.losses.tolist()]
    content = {
        "title": title,
        "ids": found.ids,
        "tokens": found.tokens,
        "losses": losses,
        "most": max(_short(float(np.quantile(found.losses, 0.95))), 1e-3),
        "layers": layers,
        "predictions": predictions,
    }
    # The text of a token never ends the element that holds the data.
    data = json.dumps(content).replace("<", "\\u003c")
    page = importlib.resources.files("moelib.inference").joinpath("trace_page.html")
    return page.read_text("utf-8").replace(">DATA<", f">{data}<", 1)


def _experts(arrays: dict[str, Any]) -> list[list[list[float]]]:
    """Returns the [id, weight] of each token's experts."""
    pairs = zip(arrays[EXPERT_IDS].tolist(), arrays[EXPERT_WEIGHTS].tolist(), strict=True)
    return [[[i, _short(w)] for i, w in zip(*each, strict=True)] for each in pairs]


def _short(x: float) -> float:
    return float(f"{x:.4g}")
