"""The store as a library, in thirty lines: keep the KV of a prompt, and get it back in another process.

python -m examples.embedded build/kv   # run it twice: the second time the blocks are there
"""

import sys
import time

from kvstore.config import Config
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.opening import open_store


def main(directory: str) -> None:
    """Look a prompt up; compute and store what is missing."""
    file = {"directories": [directory], "capacity": "256MiB"}
    store = open_store(Config.from_mapping({"memory": {"capacity": "128MiB"}, "file": file}))
    layout = Layout("float16", num_layers=8, num_heads=4, plane_dims=(64, 64), tokens_per_block=16)
    namespace = store.open_namespace(Identity("a-model", weights=b"a digest of its weights"), layout)
    chain = namespace.keys(range(1000))  # 62 whole blocks; the rest of the prompt has no key
    prefetch = store.prefetch(chain, deadline_s=time.monotonic() + 1.0)
    while not prefetch.done:
        store.wait(0.01)
        store.poll()
    with store.pin(chain) as loan:
        print(f"{loan.num_blocks} of {len(chain)} blocks were there, from {dict(prefetch.blocks_from) or 'RAM'}")
        missing, parent = chain[loan.num_blocks :], loan.keys[-1] if loan.num_blocks else None
    with store.reserve(namespace, len(missing)) as lease:
        for view in lease.views:
            view[:] = bytes(len(view))  # here an engine copies the KV that it has computed
        accepted = store.commit(lease, missing[: lease.num_blocks], parent).accepted
    print(f"{len(accepted)} blocks are on their way to {directory}")
    store.close()


if __name__ == "__main__":
    main(sys.argv[1])
