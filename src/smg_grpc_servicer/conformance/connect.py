"""Dialling the server and finding out which of the four protos it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from smg_grpc_servicer.testing.dialects import DIALECTS, Dialect

RECEIVE_BYTES = 256 * 1024 * 1024
"""Messages past the gateway's limit are taken in, so that they can be measured and named."""

REACH_SECONDS = 10.0


class Unusable(Exception):
    """There is nothing here to check; the message says why."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the server."""

    address: str
    """`host:port`; a `grpc://` or `grpcs://` in front is dropped."""
    root_certificates: bytes | None = None
    """PEM; TLS when given."""
    token: str | None = None
    client_pair: tuple[bytes, bytes] | None = None
    """PEM key and certificate, for a server that wants to know its clients."""
    options: Sequence[tuple[str, Any]] = field(default=())

    @property
    def target(self) -> str:
        return self.address.rpartition("://")[2]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open(self, *more: tuple[str, Any], through: str | None = None) -> grpc.aio.Channel:
        """A channel with connections of its own; `through` dials another address for the same
        server.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", RECEIVE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            *self.options,
            *more,
        ]
        if self.root_certificates is None:
            return grpc.aio.insecure_channel(through or self.target, options=options)
        if through is not None:
            host = self.target.rpartition(":")[0].strip("[]")
            options.append(("grpc.ssl_target_name_override", host))
        key, certificate = self.client_pair or (None, None)
        credentials = grpc.ssl_channel_credentials(self.root_certificates, key, certificate)
        return grpc.aio.secure_channel(through or self.target, credentials, options=options)


async def detect(connection: Connection, wanted: str | None, timeout: float) -> Dialect:
    """The dialect the server speaks, by HealthCheck of each service.

    :raises Unusable: nobody answers, or none of the four (or not the wanted one) is served.
    """
    async with connection.open() as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), min(timeout, REACH_SECONDS))
        except asyncio.TimeoutError:
            hint = "" if connection.root_certificates else "; if it speaks TLS, give --tls-ca"
            raise Unusable(f"{connection.target} does not answer{hint}") from None
        seen: dict[str, grpc.StatusCode] = {}
        for name, dialect in DIALECTS.items():
            if wanted in (None, name):
                seen[name] = await _health(connection, channel, dialect, timeout)
    if grpc.StatusCode.UNAUTHENTICATED in seen.values():
        raise Unusable(f"{connection.target} refuses the token; give --token-file")
    known = [name for name, code in seen.items() if code is not grpc.StatusCode.UNIMPLEMENTED]
    if not known:
        what = f"the {wanted} service" if wanted else "any of " + ", ".join(DIALECTS)
        raise Unusable(f"{connection.target} does not serve {what}")
    # One that is up goes before one that is not ready, as the gateway decides.
    return DIALECTS[min(known, key=lambda name: seen[name] is not grpc.StatusCode.OK)]


async def _health(
    connection: Connection, channel: grpc.aio.Channel, dialect: Dialect, timeout: float
) -> grpc.StatusCode:
    try:
        await dialect.stub(channel).HealthCheck(
            dialect.pb.HealthCheckRequest(), timeout=timeout, metadata=connection.metadata
        )
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
