"""The benchmark of the tiers runs, and its file is what readers of results expect. How fast it was is no test."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = {"tier", "op", "block_bytes", "gbps", "limit_gbps", "ratio", "repeats"}
COST = {"what", "value", "unit", "wanted", "limit", "repeats"}


def test_a_quick_run_writes_every_row(tmp_path: Path) -> None:
    output = tmp_path / "tiers.json"
    command = [sys.executable, "-m", "bench.tiers", "--quick", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = json.loads(output.read_text())
    assert {"commit", "date", "host", "rows", "costs"} <= results.keys()
    assert all(row.keys() >= ROW and row["gbps"] > 0 and row["limit_gbps"] > 0 for row in results["rows"])
    assert {(row["tier"], row["op"]) for row in results["rows"]} >= {
        ("memory", "store"),
        ("memory", "load"),
        ("file", "write"),
        ("file", "read"),
        ("redis", "write"),
        ("redis", "read"),
        ("memory+file", "store"),
        ("memory+file", "load"),
    }
    assert all(cost.keys() >= COST and cost["value"] > 0 for cost in results["costs"])
    assert len(results["costs"]) >= 8
