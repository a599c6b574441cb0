"""The certificate that other hosts see. Files that have changed are read again: renewal needs no restart."""

import logging
from pathlib import Path

import grpc

from kvstore.config import ServerConfig
from kvstore.errors import ConfigError

_log = logging.getLogger(__name__)


def credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """TLS, and a client certificate where a CA for them is named. Raises ``ConfigError`` where that is not enough."""
    if config.tls_cert_file is None or config.tls_key_file is None:
        raise ConfigError(
            f"server.listen is {config.listen} without TLS: set server.tls_cert_file and server.tls_key_file"
        )
    if not (config.token or config.tenants_file or config.tls_client_ca_file):
        raise ConfigError(
            f"server.listen is {config.listen}, and anybody could use it: set server.token, server.tenants_file or"
            " server.tls_client_ca_file"
        )
    files = [config.tls_cert_file, config.tls_key_file]
    files += [config.tls_client_ca_file] if config.tls_client_ca_file else []
    try:
        latest = _read(files)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """At each handshake; None: nothing has changed."""
        nonlocal latest
        try:
            found = _read(files)
        except OSError as error:
            _log.warning("cannot read %s: %s; the certificate stays as it is", error.filename, error.strerror)
            return None
        if found == latest:
            return None
        latest = found
        _log.info("the certificate has been read again")
        return _configuration(found)

    needs_client = config.tls_client_ca_file is not None
    return grpc.dynamic_ssl_server_credentials(
        _configuration(latest),
        fetch,  # type: ignore[arg-type]  # its stub does not know that None means no change
        require_client_authentication=needs_client,
    )


def _read(files: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


def _configuration(found: list[bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, *client_ca = found
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)
