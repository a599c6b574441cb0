"""Who may import whom, and what an import costs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_contract_of_the_layers_is_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", ["kvstore", "kvstore.store", "kvstore.__main__"])
def test_the_store_starts_without_torch(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not {"torch", "transformers", "gguf", "safetensors"} & set(loaded)


@pytest.mark.parametrize("module", ["typer", "rich", "prometheus_client", "grpc"])
def test_only_the_edges_pay_for_what_they_use(module: str) -> None:
    assert module not in run_python("import sys, kvstore.store; print(*sys.modules)").split()
