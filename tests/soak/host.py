"""A sidecar whose files err: the product's own, over a file tier with faults. SIGUSR1 heals it.

python -m tests.soak.host SEED     configured by KVSTORE_* as any sidecar
"""

import asyncio
import errno
import os
import signal
import sys
import time
from typing import Any

from kvstore.config import Config
from kvstore.opening import open_redis_tier
from kvstore.server import logs
from kvstore.server.serve import serve_until_told
from kvstore.server.tenants import Tenants
from kvstore.store import Store
from kvstore.testing.file_faults import Call, Effect, Fault, FaultyFiles, fails, flips, tears
from kvstore.tiers.domains import Arenas, DomainMemoryTier
from kvstore.tiers.file import FileTier

BLOCKS = "blocks"


def dawdles() -> Effect:
    """The call takes long, and then is made."""

    def slow(call: Call) -> Any:
        time.sleep(0.1)
        return call.proceed(call.buffers)

    return slow


FAULTS: tuple[tuple[str, Effect, float], ...] = (
    ("preadv", fails(errno.EIO), 0.01),
    ("preadv", flips(50_001), 0.02),
    ("preadv", dawdles(), 0.02),
    ("pwritev", fails(errno.EIO), 0.01),
    ("pwritev", fails(errno.ENOSPC), 0.005),
    ("pwritev", flips(90_003), 0.02),
    ("pwritev", tears(4096), 0.02),
    ("pwritev", dawdles(), 0.02),
)


def main() -> None:
    logs.set_up()
    config = Config.load(None, os.environ)
    assert config.file is not None
    assert config.redis is not None
    files = FaultyFiles(int(sys.argv[1]))
    store = Store(
        memory=DomainMemoryTier(Arenas(config.memory.capacity_bytes, 1)),
        file=FileTier(config.file.directories, config.file.capacity_bytes, files=files),
        shared=open_redis_tier(config.redis),
        config=config,
    )
    for name, effect, probability in FAULTS:
        files.inject(Fault(name, effect, file=BLOCKS, times=None, probability=probability))
    signal.signal(signal.SIGUSR1, lambda *_: files.heal())
    asyncio.run(serve_until_told(store, config, Tenants.of(config.server)))
    store.close()


if __name__ == "__main__":
    main()
