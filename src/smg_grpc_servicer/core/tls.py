"""TLS and mutual TLS whose files may change while the server runs.

A pair that does not work stops the start (`ConfigError`); one that stops working later leaves the
last good one in force and logs an error, once per change. With client authorities a client
without a certificate of theirs is refused.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.files import Watched, read_regular


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: certificate chain, private key, and client authorities for mutual TLS."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        own = (self.cert, self.key)
        return own if self.client_ca is None else (*own, self.client_ca)


class CertificateSource:
    """The certificates in force; `fetch` is what gRPC asks at every new connection."""

    def __init__(self, files: TlsFiles) -> None:
        self._mutual = files.client_ca is not None
        self._files = Watched("TLS files", "ones", files.paths, lambda: _read(files))

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._files.value,
            self.fetch,  # type: ignore[arg-type] # None for "no change" is grpc's own contract
            require_client_authentication=self._mutual,
        )

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """New certificates, or None when those in force stay. Called on gRPC's own threads."""
        return self._files.value if self._files.refresh() else None


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert = read_regular("--tls-cert", files.cert)
    key = read_regular("--tls-key", files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password callable OpenSSL would ask on the terminal.
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except _EncryptedKeyError:
        raise ConfigError(f"--tls-key: got {str(files.key)!r}, which is encrypted") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert, --tls-key: got {str(files.cert)!r} and {str(files.key)!r}, which are no "
            f"working pair of PEM certificate and private key ({_short(error)})"
        ) from None
    roots = None
    if files.client_ca is not None:
        roots = read_regular("--tls-client-ca", files.client_ca)
        try:
            context.load_verify_locations(cadata=roots.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-client-ca: got {str(files.client_ca)!r}, which has no PEM certificates "
                f"({_short(error)})"
            ) from None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=roots)


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> bytes:
    raise _EncryptedKeyError


def _short(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error)
