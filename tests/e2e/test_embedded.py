"""The example of the store as a library, run twice as it says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_second_run_finds_what_the_first_stored(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.embedded", str(tmp_path / "kv")]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(2))
    assert "0 of 62 blocks were there" in first.stdout
    assert "62 of 62 blocks were there, from {'file': 62}" in second.stdout
