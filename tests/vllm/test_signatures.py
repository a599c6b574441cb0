"""UX-018, CR-038: our classes against the base classes of the installed vLLM, and of the newest that there is."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import vllm

from connectors.vllm import KVStoreConnector
from connectors.vllm_tier import KVStoreTier
from tests.vllm.signatures import BASES, NEWEST, methods_of

OURS = {"KVConnectorBase_V1": KVStoreConnector, "SupportsHMA": KVStoreConnector, "SecondaryTierManager": KVStoreTier}


def installed() -> dict[str, Any]:
    root = Path(vllm.__file__).parents[1]
    return {name: methods_of((root / path).read_text(), name) for path, names in BASES.items() for name in names}


def objections(bases: dict[str, Any]) -> list[str]:
    """What vLLM would trip over."""
    found = []
    for base, ours in OURS.items():
        for name, method in bases[base].items():
            mine = inspect.getattr_static(ours, name, None)
            if mine is None or name not in vars(ours):
                if method["must"]:
                    found.append(f"{ours.__name__} lacks {name}")
                continue
            if isinstance(mine, property) != method["property"]:
                found.append(f"{name} is a property in one of them")
            if isinstance(mine, property):
                continue
            parameters = inspect.signature(getattr(ours, name))
            arguments = method["arguments"]
            bound = [None] * (not isinstance(mine, classmethod))  # self
            try:
                parameters.bind(*bound, *arguments)
                parameters.bind(*bound, **dict.fromkeys(arguments))
            except TypeError as error:
                found.append(f"{ours.__name__}.{name}: {error}")
    return found


def test_our_classes_fit_the_vllm_that_is_installed() -> None:
    assert not objections(installed())


def test_our_classes_fit_the_newest_vllm() -> None:
    newest = json.loads(NEWEST.read_text())
    assert not objections(newest), newest["version"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("update_state_after_alloc", {"arguments": ["request", "blocks"]}, "missing a required argument"),
        ("build_connector_meta", {"arguments": ["output", "more"]}, "too many positional"),
        ("reset_cache", {"property": True}, "property in one"),
        ("no_such_method", {"must": True}, "lacks no_such_method"),
    ],
)
def test_a_change_would_be_seen(name: str, change: dict[str, Any], said: str) -> None:
    bases = installed()
    before = bases["KVConnectorBase_V1"].get(name, {"arguments": [], "must": False, "property": False})
    bases["KVConnectorBase_V1"][name] = {**before, **change}
    assert any(said in objection for objection in objections(bases))
