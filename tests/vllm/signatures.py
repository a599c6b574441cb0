"""The methods of vLLM's base classes in a wheel that is only read, not installed: tests/vllm/signatures.json.

python -m tests.vllm.signatures vllm-0.34.0-*.whl     a wheel of the newest release, for whatever device
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

BASES = {
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": ("KVConnectorBase_V1", "SupportsHMA"),
    "vllm/v1/kv_offload/tiering/base.py": ("SecondaryTierManager",),
}
NEWEST = Path(__file__).with_name("signatures.json")


def methods_of(source: str, name: str) -> dict[str, dict[str, object]]:
    """Of the class ``name``: the arguments of each method, and whether a subclass must have it."""
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods: dict[str, dict[str, object]] = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            methods[node.name] = {
                "arguments": arguments[0 if "staticmethod" in marks else 1 :],
                "must": "abstractmethod" in marks,
                "property": "property" in marks,
            }
    return methods


def main() -> None:
    """Read a wheel and write what it has."""
    (wheel,) = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        read = {name: archive.read(path).decode() for path, names in BASES.items() for name in names}
    found: dict[str, object] = {name: methods_of(source, name) for name, source in read.items()}
    found["version"] = Path(wheel).name.split("-")[1]
    NEWEST.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
