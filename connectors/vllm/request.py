"""What of vLLM the scheduler half touches, as types: vLLM itself is not there where these are checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Adapter(Protocol):
    """vLLM's ``LoRARequest``."""

    lora_name: str
    lora_path: str


class Feature(Protocol):
    """vLLM's ``MultiModalFeatureSpec``: what stands in a span of placeholder tokens."""

    identifier: str
    """Names its content, in block hashes too."""


class EngineRequest(Protocol):
    """vLLM's ``Request``, which grows while it computes; ``block_hashes`` has every block whose tokens are known."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    lora_request: Adapter | None
    mm_features: Sequence[Feature]
    kv_transfer_params: Mapping[str, Any] | None


class Page(Protocol):
    """vLLM's ``KVCacheBlock``."""

    block_id: int


class PagePool(Protocol):
    """vLLM's ``BlockPool``: what is touched is not handed out again until it is freed as often."""

    blocks: Sequence[Page]
    null_block: Page
    """Stands in a request's list of pages where it needs none: before a sliding window."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold pages."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Let pages go."""
