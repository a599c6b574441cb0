"""Whose blocks are whose: whatever changes the KV of a prompt is a miss, and nothing else is."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from connectors.vllm import versions
from connectors.vllm.identity import hash_scheme
from connectors.vllm.pages import PageFormat
from connectors.vllm.settings import Settings
from kvstore.errors import ConfigError
from tests.vllm.engine import ROOT
from tests.vllm.models import tiny_llama
from tests.vllm.prompts import PAGE_TOKENS
from tests.vllm.runner import Runner, vllm_config

PROMPT = list(range(1, 4 * PAGE_TOKENS + 1))
FORM = PageFormat("float32", 2, 4096, PAGE_TOKENS, "cpu (2, 32, 64) (2048, 64, 1)", "names")


def served(model: Path, directory: Path, *, dtype: str = "float32", salt: str = "", **more: Any) -> int:
    """Tokens of the prompt that a new engine loads from the files in ``directory``, where it leaves them."""
    store = {"memory": {"capacity": "1MiB"}, "file": {"directories": [str(directory)], "capacity": "16MiB"}}
    runner = Runner(model, {**store, "salt": salt}, num_pages=16, dtype=dtype)
    try:
        runner.add("r", PROMPT, **more)
        runner.run()
        return runner.counts["tokens_from_file"]
    finally:
        runner.close()


def adapter(directory: Path, value: float) -> LoRARequest:
    directory.mkdir(exist_ok=True)
    save_file({"lora_A": torch.full((8, 8), value)}, directory / "adapter_model.safetensors")
    return LoRARequest("tuned", 1, str(directory))


def test_weights_that_were_replaced_under_the_same_path(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    assert served(model, tmp_path / "kv") == 0
    assert served(model, tmp_path / "kv") == 3 * PAGE_TOKENS
    shutil.move(model, tmp_path / "moved")
    assert served(tmp_path / "moved", tmp_path / "kv") == 3 * PAGE_TOKENS, "the same model, elsewhere"
    tiny_llama(model, seed=1)
    assert served(model, tmp_path / "kv") == 0


def test_what_else_decides_the_kv(model: Path, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    one = adapter(tmp_path / "adapter", 1.0)
    ways: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"salt": "tenant"},
        {"cache_salt": "request"},
        {"lora_request": one},
    ]
    assert [served(model, kv, **way) for way in ways] == [0] * len(ways)
    assert [served(model, kv, **way) for way in ways] == [3 * PAGE_TOKENS] * len(ways)
    assert served(model, kv, lora_request=adapter(tmp_path / "adapter", 2.0)) == 0, "the adapter was replaced"


def test_another_parallel_degree_or_order_of_bytes_is_another_layout() -> None:
    prints = {
        FORM.layout(1, "vllm-0.32.0", "auto").fingerprint,
        FORM.layout(2, "vllm-0.32.0", "auto").fingerprint,
        FORM.layout(1, "vllm-0.33.0", "auto").fingerprint,
        FORM.layout(1, "vllm-0.32.0", "fp8").fingerprint,
        PageFormat("float32", 2, 4096, PAGE_TOKENS, "other", "names").layout(1, "vllm-0.32.0", "auto").fingerprint,
        PageFormat("float32", 2, 4096, PAGE_TOKENS, FORM.order, "other").layout(1, "vllm-0.32.0", "auto").fingerprint,
        replace(FORM, window_tokens=64).layout(1, "vllm-0.32.0", "auto").fingerprint,
        replace(FORM, window_tokens=65).layout(1, "vllm-0.32.0", "auto").fingerprint,
    }
    assert len(prints) == 8
    assert FORM.layout(2, "vllm-0.32.0", "auto").block_bytes == 2 * FORM.stripe_bytes


def test_hashes_that_nobody_else_can_arrive_at_are_refused() -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        hash_scheme("xxhash_cbor", b"root", {})
    seeded = {hash_scheme("xxhash_cbor", root, {"PYTHONHASHSEED": "1"}) for root in (b"one seed", b"another")}
    assert len(seeded) == 2
    assert hash_scheme("sha256", b"root", {}) != hash_scheme("sha256_cbor", b"root", {})


SHAPE: dict[str, Any] = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MambaSpec(block_size=PAGE_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,)), "MambaSpec"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        (SlidingWindowSpec(**{**SHAPE, "block_size": 2 * PAGE_TOKENS}, sliding_window=64), "pages of [32, 64] tokens"),
        (SlidingWindowSpec(**SHAPE, sliding_window=1), "one token"),
    ],
)
def test_groups_that_cannot_be_served_are_refused_loudly_and_run_without_the_store(
    model: Path, caplog: pytest.LogCaptureFixture, spec: KVCacheSpec, reason: str
) -> None:
    """State that no block has, windows that move by leaps, pages that hold another number of tokens."""
    config = vllm_config(model, {"memory": {"capacity": "1MiB"}})
    groups = [KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE)), KVCacheGroupSpec(["b"], spec)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with caplog.at_level("ERROR", logger="vllm.kvstore"):
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.kvstore"]
    assert len(said) == 1
    assert reason in said[0]
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert not connector.has_pending_push_work()


def test_an_unsupported_version_is_a_clear_error() -> None:
    methods = frozenset(vars(KVConnectorBase_V1))
    versions.require_supported(vllm.__version__, methods)
    assert not versions.is_unknown(vllm.__version__)
    assert versions.is_unknown("0.99.0rc1+cu130")
    with pytest.raises(ConfigError, match=r"too old.*install vLLM"):
        versions.require_supported("0.11.2", methods)
    with pytest.raises(ConfigError, match="lacks on_new_request"):
        versions.require_supported("0.99.0", methods - {"on_new_request"})
    with pytest.raises(ConfigError, match="no release"):
        versions.require_supported("dev", methods)


@pytest.mark.parametrize(
    ("module", "version", "lacks", "message"),
    [
        ("connectors.vllm", "0.11.2", "vllm.v1.metrics.cache_hit_source", "vLLM 0.11.2 is too old"),
        ("connectors.vllm_tier", "0.11.2", "vllm.v1.kv_offload.tiering.base", "vLLM 0.11.2 is too old"),
        ("connectors.vllm", "0.99.0", "vllm.v1.metrics.cache_hit_source", "vLLM 0.99.0 lacks what"),
        ("connectors.vllm_tier", "0.99.0", "vllm.v1.kv_offload.tiering.base", "vLLM 0.99.0 lacks what"),
    ],
)
def test_an_unsupported_vllm_is_named_and_is_no_stack_trace(
    module: str, version: str, lacks: str, message: str
) -> None:
    """UX-018, PK-002: one lacks modules, and says so by an ImportError of its own unless that is explained."""
    script = (
        "import sys, vllm, vllm.distributed.kv_transfer.kv_connector.v1.base\n"
        f"vllm.__version__ = {version!r}; sys.modules[{lacks!r}] = None\n"
        f"try: import {module}\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert f"ConfigError {message}" in said


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sidecar": "/run/kv.sock"}, "sidecar"),
        ({"memroy": {"capacity": "1GiB"}}, "did you mean memory.capacity"),
        ({"memory": {"capacity": "0"}}, "memory.capacity is 0"),
        ({"salt": 1}, "salt"),
    ],
)
def test_a_setting_that_is_none_says_so(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.read(extra, {})
