"""The KV connector of vLLM, loaded by ``--kv-transfer-config``; connectors/README.md says how."""

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from connectors.vllm import versions

versions.require_supported(vllm.__version__, frozenset(vars(base.KVConnectorBase_V1)))

with versions.explained(vllm.__version__):
    from connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
