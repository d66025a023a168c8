"""Bearer tokens: every call but `grpc.health.v1` needs one of the tokens given or in a file.

The file has one token a line, so old and new ones can overlap; blank lines and lines that start
with `#` do not count. It is read again when it changes; a file that is then empty or gone leaves
the last tokens in force. Tokens are compared in constant time and never logged.
"""

from __future__ import annotations

import codecs
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import grpc

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.files import Watched, read_regular

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_EXEMPT = "/grpc.health.v1.Health/"
_SCHEME = b"bearer "
TELL_SECONDS = 60.0
_UNSENDABLE = "holds characters that no header can carry; allowed: printable ASCII"


class TokenFile:
    """The tokens in force."""

    def __init__(self, path: Path) -> None:
        self._file = Watched("token file", "tokens", [path], lambda: _read(path))

    def accepts(self, token: bytes) -> bool:
        """Whether it is one of them; looks for a changed file first."""
        self._file.refresh()
        return _is_one_of(token, self._file.value)


class GivenTokens:
    """Tokens from a command line or a variable; they stay for the life of the process."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """:raises ConfigError: no client could send one of them."""
        self._tokens = tuple(token.encode() for token in tokens)
        if not all(map(_can_be_sent, self._tokens)):
            raise ConfigError(f"--api-key: {_UNSENDABLE}")

    def accepts(self, token: bytes) -> bool:
        return _is_one_of(token, self._tokens)


class BearerAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without a known token, whatever their kind, before their handler is chosen."""

    def __init__(self, *sources: TokenFile | GivenTokens) -> None:
        self._sources = sources
        self._refusal: Handler = grpc.stream_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        details: Any = handler_call_details
        if details.method.startswith(_EXEMPT) or self._allowed(details.invocation_metadata):
            return await continuation(handler_call_details)
        return self._refusal

    def _allowed(self, metadata: Any) -> bool:
        values = [value for key, value in metadata or () if key == "authorization"]
        if len(values) != 1:
            return False
        value = values[0] if isinstance(values[0], bytes) else values[0].encode()
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return False
        token = value[len(_SCHEME) :].strip()
        # A list: each source takes its time, whichever of them knows the token.
        return any([source.accepts(token) for source in self._sources])  # noqa: C419 - see above


def _is_one_of(token: bytes, known: Iterable[bytes]) -> bool:
    accepted = False
    for each in known:  # all of them, so the time does not tell which came close
        accepted |= hmac.compare_digest(token, each)
    return accepted


_last_told = -inf


def _tell(peer: str) -> None:
    """One warning a minute: a gateway with a wrong token is seen here, a flood fills no disk."""
    global _last_told  # noqa: PLW0603 - one log, one pace
    now = monotonic()
    if now - _last_told >= TELL_SECONDS:
        _last_told = now
        log.warning("a call from %s was refused: no token of this server", peer)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    _tell(context.peer())
    # A stream-in handler reads nothing, so a refused call never waits for its first message.
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "authorization: a bearer token of this server is required",
    )


def _read(path: Path) -> tuple[bytes, ...]:
    data = read_regular("--auth-token-file", path).removeprefix(codecs.BOM_UTF8)
    lines = [line.strip() for line in data.splitlines()]
    tokens = {at: line for at, line in enumerate(lines, 1) if line and not line.startswith(b"#")}
    where = f"--auth-token-file: got {str(path)!r}"
    if not tokens:
        raise ConfigError(f"{where}, which holds no token")
    for at, token in tokens.items():
        if not _can_be_sent(token):
            raise ConfigError(f"{where}, whose line {at} {_UNSENDABLE}")
    return tuple(tokens.values())


def _can_be_sent(token: bytes) -> bool:
    """Whether a client can: what a header of HTTP/2 may hold, as gRPC has it for ASCII values."""
    return all(0x20 <= byte < 0x7F for byte in token)
