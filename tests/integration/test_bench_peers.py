"""The comparison with peers runs on our side, without installing any. How fast it was is no test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = {"work", "op", "block_bytes", "side", "way", "value", "unit", "ours_over", "repeats"}


@pytest.mark.parametrize(
    ("work", "ops"), [("file", {"write", "read"}), ("tables", {"hash", "look up", "hash and look up"})]
)
def test_a_quick_run_writes_every_row_of_ours(tmp_path: Path, work: str, ops: set[str]) -> None:
    output = tmp_path / "peers.json"
    command = [sys.executable, "-m", "bench.peers", "--quick", "--ours", "--only", work, "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = json.loads(output.read_text())
    assert {"commit", "date", "host", "versions", "rows"} <= results.keys()
    assert results["skipped"] == {}
    assert all(row.keys() >= ROW and row["value"] > 0 for row in results["rows"])
    assert {row["op"] for row in results["rows"] if row["side"] == "this store"} == ops
