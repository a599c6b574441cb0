"""Which releases of vLLM this connector works with: its interface and its tensors' layout change between them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvstore.errors import ConfigError

OLDEST = (0, 32)
NEWEST = (0, 34)
"""The newest that was run. A newer one is taken, with a warning, if it has what is needed."""
NEEDED = ("bind_gpu_block_pool", "get_transfer_results", "has_pending_push_work", "on_new_request")


def parse(version: str) -> tuple[int, int]:
    """``0.32.0+cpu`` to ``(0, 32)``. Raises ``ConfigError`` for what is no release."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"vLLM says it is version {version!r}, which is no release: install {_wanted()}")
    return int(major), int(minor)


def require_supported(version: str, methods: Collection[str]) -> None:
    """Raises ``ConfigError`` for a release that cannot work. ``methods``: those of its base class for connectors."""
    missing = [name for name in NEEDED if name not in methods]
    if parse(version) < OLDEST:
        raise ConfigError(f"vLLM {version} is too old for this connector: install {_wanted()}")
    if missing:
        raise ConfigError(f"vLLM {version} lacks {', '.join(missing)}, which this connector needs: use {_wanted()}")


@contextmanager
def explained(version: str) -> Iterator[None]:
    """Around imports of vLLM. Raises ``ConfigError`` for what a release lacks, in place of ``ImportError``."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"vLLM {version} lacks what this connector needs ({error}): use {_wanted()}") from error


def skips_reading(request: object) -> bool:
    """Whether a request wants all of its prompt computed; the attribute has another name as of 0.34."""
    newer, older = "skip_reading_external_kv", "skip_reading_prefix_cache"
    return bool(getattr(request, newer if hasattr(request, newer) else older))


def is_unknown(version: str) -> bool:
    """Whether it is newer than any that was run."""
    return parse(version) > NEWEST


def _wanted() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"vLLM {oldest}" if oldest == newest else f"vLLM {oldest} to {newest}"
