"""The benchmark of the sidecar runs, and its file is what readers of results expect. How fast it was is no test."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_quick_run_writes_every_row(tmp_path: Path) -> None:
    output = tmp_path / "sidecar.json"
    command = [sys.executable, "-m", "bench.sidecar", "--quick", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = json.loads(output.read_text())
    assert {"commit", "date", "host", "rows", "costs"} <= results.keys()
    assert [row["op"] for row in results["rows"]] == ["store", "load", "store_from", "load_into"] * 2
    assert all(row["gbps"] > 0 and row["limit_gbps"] > 0 for row in results["rows"])
    assert len(results["costs"]) >= 8
    assert all(cost["value"] > 0 for cost in results["costs"])
