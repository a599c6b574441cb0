"""Every policy that the configuration may name passes the suite of policies."""

from kvstore.policy import POLICIES
from kvstore.testing.policy_contract import PolicyContract


class TestHIX(PolicyContract):
    name = "hix"


class TestLRU(PolicyContract):
    name = "lru"


def test_every_policy_of_the_registry_is_here() -> None:
    assert {suite.name for suite in PolicyContract.__subclasses__()} == set(POLICIES)
