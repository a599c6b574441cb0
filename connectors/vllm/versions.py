"""Which releases of vLLM this connector works with: its interface and its tensors' layout change between them."""

from kvstore.errors import ConfigError

OLDEST = (0, 32)
NEWEST = (0, 32)
"""The newest that was run. A newer one is taken, with a warning, if it has what is needed."""


def parse(version: str) -> tuple[int, int]:
    """``0.32.0+cpu`` to ``(0, 32)``. Raises ``ConfigError`` for what is no release."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"vLLM says it is version {version!r}, which is no release: install {_wanted()}")
    return int(major), int(minor)


def require_supported(version: str, missing: list[str]) -> str:
    """A warning, or nothing. Raises ``ConfigError`` for a release that cannot work.

    ``missing`` names what the connector needs and this vLLM lacks.
    """
    release = parse(version)
    if release < OLDEST:
        raise ConfigError(f"vLLM {version} is too old for this connector: install {_wanted()}")
    if missing:
        raise ConfigError(f"vLLM {version} lacks {', '.join(missing)}, which this connector needs: use {_wanted()}")
    if release > NEWEST:
        return f"vLLM {version} is newer than any that this connector was run with; that is {_wanted()}"
    return ""


def _wanted() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"vLLM {oldest}" if oldest == newest else f"vLLM {oldest} to {newest}"
