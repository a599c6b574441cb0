"""Whose KV a vLLM engine computes: everything that decides its bytes and that vLLM's own block hashes leave out."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.vllm.request import Adapter
from kvstore.errors import ConfigError
from kvstore.hashing import Identity
from kvstore.weights import weights_digest

SEEDED_HASHES = ("xxhash", "xxhash_cbor")
"""Of these, vLLM draws a seed for each process unless PYTHONHASHSEED gives one."""
_NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version")


def identity_of(vllm_config: Any, salt: str) -> Identity:
    """The engine's identity, without an adapter. Raises ``ConfigError`` where it cannot be told."""
    model = vllm_config.model_config
    computed = hashlib.sha256(_computation(model).encode())
    computed.update(b"dummy" if str(vllm_config.load_config.load_format) == "dummy" else _weights(model))
    return Identity(
        model="/".join(getattr(model.hf_config, "architectures", None) or [model.hf_config.model_type]),
        weights=computed.digest(),
        revision=str(model.revision or ""),
        salt=salt,
    )


def hash_scheme(algorithm: str, root: bytes, environ: Mapping[str, str]) -> str:
    """What hashed the chain; ``root`` is vLLM's hash of no block at all, which shows its seed.

    Raises ``ConfigError`` for hashes that no other process can arrive at.
    """
    if algorithm in SEEDED_HASHES and "PYTHONHASHSEED" not in environ:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm!r} has a seed of its own in every process, so that nothing would"
            " ever be found again: use sha256_cbor, or set PYTHONHASHSEED to the same number everywhere"
        )
    # What is not CBOR is a pickle, whose bytes may differ between versions of Python.
    python = "" if algorithm.endswith("_cbor") else f"-python{sys.version_info.major}.{sys.version_info.minor}"
    return f"vllm-{algorithm}{python}-{root.hex()[:16]}"


def adapter_version(adapter: Adapter) -> str:
    """A digest of the adapter's weights. Raises ``ConfigError`` where they cannot be read."""
    return weights_digest(Path(adapter.lora_path)).hex()


def _computation(model: Any) -> str:
    """What is done with the weights: overrides and rope scaling lie in the model's configuration."""
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_COMPUTED_WITH}
    config["dtype"] = str(model.dtype)
    config["quantization"] = str(model.quantization)
    return json.dumps(config, sort_keys=True, default=str)


def _weights(model: Any) -> bytes:
    path = Path(model.model)
    if not path.exists():
        path = _snapshot(model.model, model.revision)
    return weights_digest(path)


def _snapshot(name: str, revision: str | None) -> Path:
    """Where a model of a hub was put when vLLM fetched it."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with vLLM, and only there

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot find the weights of {name!r} on this machine ({error}): give vLLM the model as a directory"
        ) from error
