"""The KV connector of vLLM, loaded by ``--kv-transfer-config``; connectors/README.md says how."""

from connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
