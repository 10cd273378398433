"""From an instruction's op_name to the place in the trainer's config that made it.

Modules put their names into the op_name of what they compute: "jit(train_step)/jvp(decoder)/while/
body/repeated0/feed_forward/dot_general" is of `model.decoder.block[0].feed_forward`.
"""

import re
from collections import deque
from typing import Any

_WORDS = re.compile(r"[\w.\-]+")
_LAYER = re.compile(r"layer(\d+)|repeated(\d+)")


def config_path(op_name: str, model: Any = None) -> str:
    """Returns the path of the innermost config that is known to have made an instruction.

    Args:
        op_name: Of the instruction.
        model: The trainer's model, a module; without it the answer is "model" or "learner".
    """
    words = _WORDS.findall(op_name)
    if "learner" in words:
        return "learner"
    path, node = "model", model
    for word in words if model is not None else ():
        for module in _way(node, word):
            path, node = _below(path, node, module), module
    return path


def _way(node: Any, name: str) -> list[Any]:
    """Returns the modules from below a node down to the nearest of that name; none if none is."""
    queue = deque([(child, [child]) for child in node.children.values()])
    while queue:
        module, way = queue.popleft()
        if module.name == name:
            return way
        queue.extend((child, [*way, child]) for child in module.children.values())
    return []


def _below(path: str, parent: Any, child: Any) -> str:
    """Returns the path of a child's config, or its parent's if that has no field for it."""
    fields = dict(parent.config.items())
    if child.name in fields:
        return f"{path}.{child.name}"
    found = _LAYER.fullmatch(child.name)
    if not found or "block" not in fields:
        return path
    first, size = len(fields["first_layers"]), len(fields["block"])
    if found.group(2):
        return f"{path}.block[{found.group(2)}]"
    index = int(found.group(1))
    if index < first:
        return f"{path}.first_layers[{index}]"
    return f"{path}.block[{(index - first) % size}]"
