"""The accelerator benchmark where there is none: every measurement runs, and no number is claimed."""

import json
from pathlib import Path

import pytest
import torch

from bench import gpu


@pytest.mark.parametrize("model", gpu.MODELS)
def test_every_measurement_runs(model: str) -> None:
    rows = gpu.measure(model, torch.device("cpu"), num_blocks=2, repeats=1, matmul_size=8)
    ways = {(row["way"], row["direction"]) for row in rows}
    pipelines = [f"{way}{slots}" for way in gpu.AXES for slots in ("", ", slots not registered")]
    for way in ("plain pinned copy", *pipelines):
        assert {(way, direction) for direction in ("offload", "onboard", "both ways")} <= ways
    runs = [f"{way}: {how}" for way in gpu.AXES for how in ("a copy for each run", "runs in batches")]
    for way in (*runs, *(f"{way}: slowdown of a matmul" for way in pipelines)):
        assert {(way, direction) for direction in ("offload", "onboard")} <= ways


@pytest.mark.skipif(
    torch.accelerator.current_accelerator(check_available=True) is not None, reason="this machine has an accelerator"
)
def test_without_an_accelerator_it_says_that_it_has_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--out", str(tmp_path / "gpu.json")])
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["has_run"] is False
    assert report["rows"] == []
    assert "has not run" in report["statement"]
    assert "has not run" in capsys.readouterr().out
