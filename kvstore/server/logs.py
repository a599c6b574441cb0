"""What the sidecar logs: one JSON object a line, and of each kind of event one line per interval."""

import json
import logging
import sys
import time
from collections.abc import Callable

INTERVAL_S = 10.0


class JsonLines(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, where, what; and how many like it were left out before."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        suppressed = getattr(record, "num_suppressed", 0)
        if suppressed:
            line["suppressed"] = suppressed
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class OnePerInterval(logging.Filter):
    """Lets through the first event of a kind, then one after each interval; a kind is its message's template."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be written; counts those that are not."""
        kind = record.name, str(record.msg)
        now_s = self._clock()
        at_s, num_suppressed = self._last.get(kind, (-INTERVAL_S, 0))
        if now_s - at_s < INTERVAL_S:
            self._last[kind] = at_s, num_suppressed + 1
            return False
        self._last[kind] = now_s, 0
        record.num_suppressed = num_suppressed
        return True


def set_up() -> None:
    """Write to stderr; as plain lines where a person looks on."""
    handler = logging.StreamHandler()
    if sys.stderr.isatty():
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(JsonLines())
    handler.addFilter(OnePerInterval())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
