"""Messages of Orbax about errors, which it also raises: the library reports each on one line."""

import functools
import logging
import re
import sys
import traceback
from typing import Any

_TENSORSTORE = re.compile(r"\[tensorstore_spec=| in OCDBT database ")  # In its errors.


@functools.cache  # Once per process.
def silence_orbax() -> None:
    """Drops the pages that Orbax prints about an error: traces of its threads, specs of arrays.

    It logs errors of its threads with traces. The other operations of the same folder are
    abandoned: futures and coroutines that are never awaited, whose errors of TensorStore asyncio
    logs without a trace, and calls back into an event loop that is closed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(lambda record: not _is_error_of_orbax(record))
    before = sys.unraisablehook

    def hook(args: Any) -> None:
        code = getattr(args.object, "cr_code", None)
        late = args.object is None and str(args.exc_value) == "Event loop is closed"
        if not late and (code is None or "orbax" not in code.co_filename):
            before(args)

    sys.unraisablehook = hook


def _is_error_of_orbax(record: logging.LogRecord) -> bool:
    _, error, trace = record.exc_info or (None, None, None)
    paths = (record.pathname, *(frame.filename for frame in traceback.extract_tb(trace)))
    abandoned = "never retrieved" in record.getMessage() and _TENSORSTORE.search(str(error))
    return record.levelno >= logging.ERROR and (bool(abandoned) or any("orbax" in p for p in paths))
