"""The page of cases and the fault model name tests that exist, and every case that a test names is on the page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases.md"
FAULTS = ROOT / "tests" / "fault" / "README.md"
TESTS = sorted([*ROOT.glob("tests/*/test_*.py"), *ROOT.glob("kvstore/testing/*.py"), *ROOT.glob("gpu_io/testing*.py")])

_ROW = re.compile(r"^\| ([A-Z]{2}-\d{3}) \|.*\| (.+) \|$", re.MULTILINE)
_PATH = re.compile(r"`((?:\.\./)*[\w/]+\.py)(?:::(\w+))?`")


def test_every_case_is_there_once_and_in_order() -> None:
    names = [name for name, _ in _ROW.findall(CASES.read_text())]
    assert len(names) > 100
    assert names == sorted(set(names))


@pytest.mark.parametrize("page", [CASES, FAULTS], ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for name, definition in _PATH.findall(page.read_text()):
        # Suites that are shipped are named by their path from the root.
        path = next((found for base in (page.parent, ROOT) if (found := base / name).exists()), None)
        assert path, f"{name} does not exist"
        assert re.search(rf"(def|class) {definition}\b", path.read_text()), f"{name} has no {definition}"


def test_every_case_that_a_test_names_is_on_the_page() -> None:
    here = {name for name, _ in _ROW.findall(CASES.read_text())}
    named = {name for path in TESTS for name in re.findall(r"\b[A-Z]{2}-\d{3}\b", path.read_text())}
    assert named - here == set()
