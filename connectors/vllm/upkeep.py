"""Applies what the tiers return while vLLM's scheduler sleeps, so that an idle engine need not step for it.

The store has one owner at a time: whoever has ``owning``. The scheduler's thread takes it for each of its calls; here
it is held for one ``poll``, which reads tables and never waits.
"""

import logging
import threading

from kvstore.block_store import BlockStore

INTERVAL_S = 0.2

_log = logging.getLogger(__name__)


class Upkeep:
    """A thread, from now until ``close``."""

    def __init__(self, store: BlockStore, owning: threading.Lock) -> None:
        self._store = store
        self._owning = owning
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. To be called without ``owning``."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._store.wait(INTERVAL_S)
            with self._owning:
                try:
                    self._store.poll()
                except Exception:  # noqa: BLE001 - the edge of a thread: a bug here must not end it unseen
                    _log.exception("the store could not apply what its tiers returned")
                    self._closing.wait(INTERVAL_S)
