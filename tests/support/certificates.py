"""Certificates for tests, made by the `openssl` program: no library, no network."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def _key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, PEM files."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority that lives in a directory."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.cert = directory / "ca.pem"
        self._key = directory / "ca.key"
        _key(self._key)
        _openssl(
            "req", "-x509", "-new", "-key", str(self._key), "-out", str(self.cert),
            "-days", "2", "-subj", f"/CN={name}",
        )  # fmt: skip

    def issue(self, name: str) -> Pair:
        """A certificate for localhost and 127.0.0.1 whose common name is `name`."""
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        request = self._directory / f"{name}.csr"
        extra = self._directory / f"{name}.ext"
        extra.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _key(pair.key)
        _openssl("req", "-new", "-key", str(pair.key), "-out", str(request), "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key),
            "-CAcreateserial", "-days", "2", "-extfile", str(extra), "-out", str(pair.cert),
        )  # fmt: skip
        return pair


def encrypted(key: Path, path: Path) -> Path:
    """The same key behind a passphrase."""
    _openssl("ec", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(path))
    return path
