"""Origins of HLO instructions: source lines, the phase of the step, and the path in the config.

Tables at the head of a module (FileNames, FunctionNames, FileLocations and StackFrames) hold source
lines; an instruction names its innermost frame. They do not contain JAX's own frames.

Modules put their names into the `op_name` of their operations: "jit(train_step)/jvp(decoder)/while/
body/repeated0/feed_forward/dot_general" belongs to `model.decoder.block[0].feed_forward`.
"""

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from moelib.planning.hlo.program import Instruction

PHASES = ("forward", "recomputed", "backward", "optimizer", "other")

_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_WORDS = re.compile(r"[\w.\-]+")
_LAYER = re.compile(r"layer(\d+)|repeated(\d+)")


def phase(op_name: str) -> str:
    """Returns the phase of the step that an instruction belongs to: one of `PHASES`."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "optimizer" if "/learner/" in op_name else "other"


# -- Source lines --------------------------------------------------------------------------------


class SourceLocation(NamedTuple):
    """A source line."""

    file: str  # Path inside the package.
    function: str
    line: int

    def __str__(self) -> str:
        """Returns the location as "layers/norm.py:35"."""
        return f"{self.file}:{self.line}"


class SourceMap:
    """The source locations of a module's instructions."""

    def __init__(self, text: str) -> None:
        """Reads the tables of an HLO module's text; without them the map is empty."""
        files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
        self._locations: dict[int, SourceLocation] = {}
        for number, fields in _fields(_table(text, "FileLocations")).items():
            file = files.get(fields.get("file_name_id", 0), "").strip('"')
            function = functions.get(fields.get("function_name_id", 0), "").strip('"')
            function = function.rpartition("<locals>.")[2]
            location = SourceLocation(_short(file), function, fields.get("line", 0))
            self._locations[number] = location
        self._frames = _fields(_table(text, "StackFrames"))

    def stack(self, instruction: Instruction, depth: int = 3) -> list[SourceLocation]:
        """Returns the innermost calls that made an instruction, innermost first."""
        found = _FRAME_ID.search(instruction.attributes)
        number = int(found.group(1)) if found else 0
        locations: list[SourceLocation] = []
        while number in self._frames and len(locations) < depth:
            frame = self._frames[number]
            location = self._locations.get(frame.get("file_location_id", 0))
            locations += [] if location is None else [location]
            number = frame.get("parent_frame_id", 1) - 1  # The table counts parents from 1.
        return locations

    def lines(self, instruction: Instruction) -> list[str]:
        """Returns the calls that made an instruction, innermost first, without those of core/.

        Its functions only pass calls on.
        """
        return [str(x) for x in self.stack(instruction, 9) if not x.file.startswith("core/")]


def _table(text: str, name: str) -> Mapping[int, str]:
    """Returns the numbered lines of a table, from its name to an empty line."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    lines = found.group(1).splitlines() if found else []
    return {int(number): rest for number, _, rest in (line.partition(" ") for line in lines)}


def _fields(table: Mapping[int, str]) -> dict[int, dict[str, int]]:
    return {
        number: {key: int(value) for key, value in _FIELD.findall(text)}
        for number, text in table.items()
    }


def _short(file: str) -> str:
    """Returns the path of a file inside the package, or its last two parts."""
    inside = file.rpartition("/moelib/")[2]
    return inside if inside != file else "/".join(file.split("/")[-2:])


# -- Paths in the config -------------------------------------------------------------------------


def config_path(op_name: str, model: Any = None) -> str:
    """Returns the path of the innermost config that is known to have made an instruction.

    Without the trainer's model, a module, the result is "model" or "learner".
    """
    words = _WORDS.findall(op_name)
    if "learner" in words:
        return "learner"
    path, node = "model", model
    for word in words if model is not None else ():
        for module in _descent(node, word):
            path, node = _below(path, node, module), module
    return path


def _descent(node: Any, name: str) -> list[Any]:
    """Returns the modules below a node down to the nearest one of a name; [] if there is none."""
    queue = deque([(child, [child]) for child in node.children.values()])
    while queue:
        module, way = queue.popleft()
        if module.name == name:
            return way
        queue.extend((child, [*way, child]) for child in module.children.values())
    return []


def _below(path: str, parent: Any, child: Any) -> str:
    """Returns the path of a child's config, or its parent's if that has no field for it."""
    cfg = parent.config
    if child.name in cfg:
        return f"{path}.{child.name}"
    found = _LAYER.fullmatch(child.name)
    if not found or "block" not in cfg:
        return path
    first, size = len(cfg.first_layers), len(cfg.block)
    if found.group(2):
        return f"{path}.block[{found.group(2)}]"
    index = int(found.group(1))
    if index < first:
        return f"{path}.first_layers[{index}]"
    return f"{path}.block[{(index - first) % size}]"
