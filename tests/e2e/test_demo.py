"""The demo as a person runs it, with the small model: five processes, a real Valkey, the same tokens everywhere."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_tier_serves_the_tokens_of_a_run_without_the_store(tmp_path: Path) -> None:
    output = tmp_path / "demo.json"
    command = [sys.executable, "-m", "examples.demo", "--generated", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["model"] == "generated"
    assert result["prompt_tokens"] >= 4000
    assert result["cold_tokens_equal"]
    assert set(result["warm"]) == {"hbm", "memory", "file", "redis"}
    for row in result["warm"].values():
        assert row["tokens_equal"]
        assert row["tokens_from_tier"] == (result["prompt_tokens"] - 1) // 16 * 16
    assert all(row["tokens_equal"] for row in result["shared"].values())
    served = {stage: row["tokens_from_sidecar"] for stage, row in result["shared"].items()}
    whole = (result["prompt_tokens"] - 1) // 16 * 16
    assert served["sidecar-first"][0] == 0
    assert served["sidecar-second"][0] == whole  # what the other engine computed
