"""One of the processes of ``bench.sidecar``: says that it is ready, waits for a line, and looks up COUNT times.

python -m bench.sidecar_client SOCKET COUNT
"""

import sys
from contextlib import closing
from pathlib import Path

from bench.engine_side import layout_of
from bench.sidecar import BLOCK_BYTES, IDENTITY, SHORT_BLOCKS
from kvstore.client.store_client import StoreClient


def main() -> None:
    with closing(StoreClient(Path(sys.argv[1]), budget_s=5.0)) as client:
        if not client.wait_connected(20.0):
            sys.exit("no sidecar")
        chain = client.open_namespace(IDENTITY, layout_of(BLOCK_BYTES)).keys(range(16 * SHORT_BLOCKS))
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(int(sys.argv[2])):
            while client.lookup(chain).pending:
                client.wait(1.0)
                client.poll()


if __name__ == "__main__":
    main()
