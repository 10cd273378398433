"""Where in the source an HLO instruction was made, from the tables at the head of the module.

The tables are FileNames, FunctionNames, FileLocations and StackFrames; an instruction names its
innermost frame. JAX's own frames are not in them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from moelib.planning.hlo.program import Instruction

_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")


def phase(op_name: str) -> str:
    """Returns which part of a step made an instruction: one of `step_report.PHASES`.

    `recomputed` is what the backward pass computes again of the forward pass.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "optimizer" if "/learner/" in op_name else "other"


class Place(NamedTuple):
    """A line of a function; the file as seen from the package."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        """Returns layers/norm.py:35."""
        return f"{self.file}:{self.line}"


class Places:
    """The places of a module's instructions."""

    def __init__(self, text: str) -> None:
        """Reads the tables of an HLO module's text; without them no place is known."""
        files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
        self._places: dict[int, Place] = {}
        for number, fields in _fields(_table(text, "FileLocations")).items():
            file = files.get(fields.get("file_name_id", 0), "").strip('"')
            function = functions.get(fields.get("function_name_id", 0), "").strip('"')
            function = function.rpartition("<locals>.")[2]
            self._places[number] = Place(_short(file), function, fields.get("line", 0))
        self._frames = _fields(_table(text, "StackFrames"))

    def stack(self, instruction: Instruction, depth: int = 3) -> list[Place]:
        """Returns the innermost places of the calls that made an instruction, innermost first."""
        found = _FRAME_ID.search(instruction.attributes)
        number = int(found.group(1)) if found else 0
        places: list[Place] = []
        while number in self._frames and len(places) < depth:
            frame = self._frames[number]
            if (place := self._places.get(frame.get("file_location_id", 0))) is not None:
                places.append(place)
            number = frame.get("parent_frame_id", 1) - 1  # The table counts parents from 1.
        return places


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
    """Returns a file as seen from the package, or its last two parts."""
    inside = file.rpartition("/moelib/")[2]
    return inside if inside != file else "/".join(file.split("/")[-2:])
