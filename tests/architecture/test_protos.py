"""What is generated is what the protos say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    protos = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *protos]
    subprocess.run(command, check=True)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    api = ROOT / "kvstore" / "api"
    kept = {path.relative_to(ROOT): path.read_text() for path in api.rglob("*_pb2*") if path.suffix in (".py", ".pyi")}
    assert fresh
    assert kept == fresh, "run make protos"
