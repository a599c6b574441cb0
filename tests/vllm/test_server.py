"""The OpenAI server over HTTP: the flag as a person types it, the log line, the metrics, clients that go away."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.valkey import free_port
from tests.vllm.engine import ROOT, START_S, TRANSFER
from tests.vllm.prompts import CROWD, NUM_TOKENS, PAGE_TOKENS, PROMPT

pytestmark = pytest.mark.engine

WHOLE_BLOCKS = 10 * PAGE_TOKENS


class Server:
    """``vllm serve`` with the store in RAM."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self.log = log
        transfer = {**TRANSFER, "kv_connector_extra_config": {"memory": {"capacity": "64MiB"}}}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--dtype=float32"]
        command += [f"--port={self.port}", "--host=127.0.0.1", "--skip-tokenizer-init", "--enforce-eager"]
        command += [f"--block-size={PAGE_TOKENS}", "--max-model-len=2048", f"--kv-cache-memory-bytes={64 << 20}"]
        command += ["--served-model-name=tiny", "--kv-transfer-config", json.dumps(transfer)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment)

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def complete(self, prompt: list[int]) -> list[int]:
        choice = json.loads(self.get("/v1/completions", body_of(prompt)))["choices"][0]
        tokens: list[int] = choice["token_ids"]
        return tokens

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def body_of(prompt: list[int], max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


@pytest.mark.full
def test_a_server_says_where_tokens_came_from(
    model: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    server = Server(model, tmp_path / "server.log")
    try:
        server.wait_ready()
        assert server.complete(PROMPT) == expected["one"][0]
        server.get("/reset_prefix_cache", {})
        assert server.complete(PROMPT) == expected["one"][0]
        assert f"tokens the store gave {WHOLE_BLOCKS} from memory" in server.log.read_text()
        assert server.metric("vllm:kvstore_loaded_tokens_total") == WHOLE_BLOCKS
        assert server.metric("vllm:external_prefix_cache_hits_total") == WHOLE_BLOCKS

        for prompt in CROWD:  # clients that ask for much and go away at once
            body = json.dumps(body_of(prompt, 1500)).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                time.sleep(0.02)
        assert server.complete(CROWD[-1]) == expected["crowd"][-1]
        assert server.metric("vllm:num_requests_running") == 0
    finally:
        server.process.terminate()
        server.process.wait(30)
