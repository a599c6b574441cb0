"""What review should not have to look for: size, vocabulary, and reasons beside every exception to a rule."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvstore", "gpu_io", "connectors")
GENERATED = ROOT / "kvstore" / "api"
FILES = sorted(
    path
    for folder in (*PACKAGES, "bench", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if GENERATED not in path.parents
)
PRODUCT_FILES = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

BANNED_FILES = {"common", "helper", "helpers", "misc", "util", "utils"}
BANNED_WORDS = {
    # another word is in use for the thing, or no thing is meant
    "alloc": "reserve",
    "allocate": "reserve",
    "backend": "tier",
    "d2h": "offload",
    "h2d": "onboard",
    "helper": "the noun it is about",
    "manager": "the noun it is about",
    "medium": "tier",
    "refcnt": "pin",
    "refcount": "pin",
    "spill": "demote",
    "swap": "offload",
    "util": "the noun it is about",
    "utils": "the noun it is about",
    "zombie": "quarantine",
}
BANNED_PHRASES = {"cache_key": "block key", "load_back": "promote", "put_start": "reserve", "ref_cnt": "pin"}

ENGINE_NAMES = {"update_state_after_alloc", "medium"}
"""What an engine calls by a name of its own."""

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_EXCEPTION = re.compile(r"#\s*(noqa|type:\s*ignore)")
_REASON = re.compile(r"# (noqa: [A-Z0-9, ]+ - \S.{8}|type: ignore\[[a-z-]+(, [a-z-]+)*\] +# \S.{8})")


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of whatever is given a name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def objections(name: str) -> list[str]:
    if name in ENGINE_NAMES:
        return []
    words = [word.lower() for word in _WORD.findall(name)]
    phrase = f"_{'_'.join(words)}_"
    return [f"{word}: say {BANNED_WORDS[word]}" for word in words if word in BANNED_WORDS] + [
        f"{banned}: say {word}" for banned, word in BANNED_PHRASES.items() if f"_{banned}_" in phrase
    ]


def test_there_is_something_to_look_at() -> None:
    assert len(PRODUCT_FILES) > 20


def test_a_file_is_about_one_noun_and_can_be_read_at_a_sitting() -> None:
    assert not [path for path in FILES if path.stem in BANNED_FILES]
    assert not [path for path in FILES if len(path.read_text().splitlines()) > MAX_FILE_LINES]


def test_a_function_fits_on_a_screen() -> None:
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [
        f"{where(path, node.lineno)} {node.name}"
        for path, node in functions
        if (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_names_use_the_vocabulary() -> None:
    assert not [
        f"{where(path, line)} {name}: {objection}"
        for path in PRODUCT_FILES
        for line, name in definitions(ast.parse(path.read_text()))
        for objection in objections(name)
    ]


def test_every_exception_to_a_rule_gives_its_reason() -> None:
    assert not [
        f"{where(path, number)} {line.strip()}"
        for path in FILES
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if _EXCEPTION.search(line) and not _REASON.search(line)
    ]


@pytest.mark.parametrize("name", ["RedisBackend", "swap_in", "cache_key", "CacheKey", "ref_cnt_"])
def test_another_word_for_a_thing_is_noticed(name: str) -> None:
    assert objections(name)


@pytest.mark.parametrize("name", ["BlockPool", "cache_keys_of", "allocated", "swapped"])
def test_words_count_as_wholes(name: str) -> None:
    assert not objections(name)


@pytest.mark.parametrize(
    ("line", "has_reason"),
    [
        ("x = 1  # noqa: E501 - a published test vector", True),
        ("x = 1  # noqa: E501", False),
        ("x = 1  # noqa", False),
        ("x = 1  # type: ignore[misc]  # its stub knows 1-tuples only", True),
        ("x = 1  # type: ignore[misc]", False),
    ],
)
def test_a_reason_is_told_from_none(line: str, has_reason: bool) -> None:
    assert _EXCEPTION.search(line)
    assert (_REASON.search(line) is not None) == has_reason


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_finds_the_code_it_breaks(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
