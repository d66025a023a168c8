"""TLS, mutual TLS and bearer tokens over real connections."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.network import Address
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from smg_grpc_servicer.core.tls import TlsFiles
from tests.support.certificates import Authority, Pair, encrypted
from tests.support.dial import SERVING, check, watch
from tests.support.slow_service import ECHO, NAME, SlowService, echo, hold

if TYPE_CHECKING:
    from tests.support.slow_service import UnaryUnary

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
LOCAL = [("grpc.use_local_subchannel_pool", 1)]
"""A new connection for each channel: another one's handshake must not be reused."""


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    """A pair of its own copies, free to be replaced."""
    pair = authority.issue("first")
    return install(pair, TlsFiles(tmp_path / "tls.pem", tmp_path / "tls.key"))


def install(pair: Pair, files: TlsFiles) -> TlsFiles:
    shutil.copy(pair.cert, files.cert)
    shutil.copy(pair.key, files.key)
    return files


@asynccontextmanager
async def up(options: ServerOptions) -> AsyncIterator[Address]:
    board = StatusBoard()
    board.serving()
    server = GrpcServer(options, board)
    SlowService(board).add_to(server)
    try:
        yield await server.bind()
    finally:
        await server.stop(0)


async def handshake(
    address: Address, authority: Authority, client: Pair | None = None
) -> grpc.aio.AioRpcError | None:
    """Ask for the health over a new connection; the error, if any."""
    credentials = grpc.ssl_channel_credentials(
        authority.cert.read_bytes(),
        client.key.read_bytes() if client else None,
        client.cert.read_bytes() if client else None,
    )
    async with grpc.aio.secure_channel(str(address), credentials, options=LOCAL) as channel:
        try:
            assert await check(channel) == SERVING
        except grpc.aio.AioRpcError as error:
            return error
    return None


def common_name(address: Address) -> bytes:
    """Something that tells the server's certificates apart."""
    return ssl.get_server_certificate((address.host, address.port), timeout=5).encode()


async def test_tls_serves_and_plain_text_does_not(authority: Authority, files: TlsFiles) -> None:
    """Q1: with TLS on, a client without it gets nothing."""
    async with up(ServerOptions(tls=files)) as address:
        assert await handshake(address, authority) is None
        async with grpc.aio.insecure_channel(str(address), options=LOCAL) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_certificates_rotate(authority: Authority, files: TlsFiles) -> None:
    """The next connection after the files changed gets the new ones; open streams go on."""
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with up(ServerOptions(tls=files)) as address:
        before = await asyncio.to_thread(common_name, address)
        async with grpc.aio.secure_channel(str(address), credentials, options=LOCAL) as channel:
            stream = hold(channel, 0.5)
            assert await stream.read() == b"started"
            install(authority.issue("second"), files)
            after = await asyncio.to_thread(common_name, address)
            assert after != before
            assert after.strip() in files.cert.read_bytes()
            assert await handshake(address, authority) is None
            assert await stream.read() == b"done"


async def test_a_bad_rotation_keeps_the_old_pair(
    authority: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a rotation must not take the server down; it is said once, and healed later."""
    async with up(ServerOptions(tls=files)) as address:
        shutil.copy(authority.issue("third").cert, files.cert)  # the key is still the first's
        for _ in range(3):
            assert await handshake(address, authority) is None
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "the old ones stay" in errors[0].getMessage()
        files.key.unlink()
        assert await handshake(address, authority) is None
        install(authority.issue("third"), files)
        assert await handshake(address, authority) is None


async def test_a_fifo_in_place_of_a_key(
    authority: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing waits for a writer that never comes: the old pair stays, said once, then heals."""
    async with up(ServerOptions(tls=files)) as address:
        files.key.unlink()
        os.mkfifo(files.key)
        for _ in range(3):
            assert await handshake(address, authority) is None
        assert caplog.text.count("the old ones stay: --tls-key: got ") == 1
        with pytest.raises(ConfigError, match=r"--tls-key: .* not a regular file"):
            await GrpcServer(ServerOptions(tls=files), StatusBoard()).bind()
        files.key.unlink()
        before = await asyncio.to_thread(common_name, address)
        install(authority.issue("fifth"), files)
        assert await asyncio.to_thread(common_name, address) != before


async def test_mutual_tls_lets_only_known_clients_in(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    """Q1: no certificate, or one of another authority: no connection, fail closed."""
    stranger = Authority(tmp_path / "other", "another authority").issue("stranger")
    async with up(ServerOptions(tls=replace(files, client_ca=authority.cert))) as address:
        assert await handshake(address, authority, authority.issue("client")) is None
        for client in (None, stranger):
            error = await handshake(address, authority, client)
            assert error is not None
            assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_client_authorities_rotate(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    """A client authority that was taken away lets nobody in any more."""
    other = Authority(tmp_path / "other", "another authority")
    mutual = replace(files, client_ca=tmp_path / "clients.pem")
    shutil.copy(authority.cert, tmp_path / "clients.pem")
    async with up(ServerOptions(tls=mutual)) as address:
        assert await handshake(address, authority, authority.issue("client")) is None
        shutil.copy(other.cert, tmp_path / "clients.pem")
        assert await handshake(address, authority, other.issue("newcomer")) is None
        assert await handshake(address, authority, authority.issue("client")) is not None


async def test_tls_files_that_do_not_work_stop_the_start(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    """Fail closed: never plain text because a file is wrong, and the file is named."""
    pair = authority.issue("fourth")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    bad = {
        "--tls-cert: cannot read": replace(files, cert=tmp_path / "gone.pem"),
        "--tls-cert, --tls-key: .* no working pair .*key values mismatch": replace(
            files, key=pair.key
        ),
        "which is encrypted": replace(files, key=encrypted(files.key, tmp_path / "enc.key")),
        "--tls-client-ca: .* no PEM certificates": replace(files, client_ca=empty),
    }
    for words, broken in bad.items():
        with pytest.raises(ConfigError, match=words):
            await GrpcServer(ServerOptions(tls=broken), StatusBoard()).bind()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# the gateway's\nfirst-token\n\nsecond-token\n")
    return path


async def refusal(call: grpc.aio.Call) -> grpc.StatusCode:
    """How a call that must not get through ended."""
    assert "bearer token" in (await call.details() or "")
    return await call.code()


def replaced(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


async def test_a_call_needs_a_token(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Q1: every call but health, of any kind, needs a known token; no token is ever logged."""
    caplog.set_level(logging.DEBUG)
    async with (
        up(ServerOptions(auth_token_file=tokens)) as address,
        grpc.aio.insecure_channel(str(address), options=LOCAL) as channel,
    ):
        assert await echo(channel, token="first-token") == b"x"
        assert await echo(channel, token="second-token") == b"x"
        for bad in (None, "", "wrong", "first-token-and-more", "# the gateway's"):
            assert await refusal(echo(channel, token=bad)) is UNAUTHENTICATED
        both = (("authorization", "Bearer first-token"), ("authorization", "Bearer wrong"))
        method: UnaryUnary = channel.unary_unary(ECHO)
        assert await refusal(method(b"x", metadata=both)) is UNAUTHENTICATED
        assert await refusal(hold(channel, 1)) is UNAUTHENTICATED
        unknown: UnaryUnary = channel.unary_unary("/no.such.Service/Method")
        assert await refusal(unknown(b"")) is UNAUTHENTICATED
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        stream = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        silent = stream()
        assert await silent.code() is UNAUTHENTICATED
        # Health answers without one: a kubelet has none.
        assert await check(channel, NAME) == SERVING
        assert (await watch(channel, NAME).read()).status == SERVING
    assert "first-token" not in caplog.text
    assert "second-token" not in caplog.text


async def test_tokens_of_a_launcher_count_beside_those_of_the_file(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q1: `--api-key` of vLLM; the tokens are in no text."""
    caplog.set_level(logging.DEBUG)
    for file, known in ((None, ("given", "more")), (tokens, ("given", "more", "first-token"))):
        options = ServerOptions(auth_token_file=file, auth_tokens=("given", "more"))
        async with (
            up(options) as address,
            grpc.aio.insecure_channel(str(address), options=LOCAL) as channel,
        ):
            for token in known:
                assert await echo(channel, token=token) == b"x"
            for bad in (None, "", "give", "given-and-more"):
                assert await refusal(echo(channel, token=bad)) is UNAUTHENTICATED
        assert "given" not in repr(options)
    assert "given" not in caplog.text


async def test_tokens_rotate(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed file counts at the next call; one that became empty changes nothing."""
    async with (
        up(ServerOptions(auth_token_file=tokens)) as address,
        grpc.aio.insecure_channel(str(address), options=LOCAL) as channel,
    ):
        replaced(tokens, "third-token\n")
        assert await refusal(echo(channel, token="first-token")) is UNAUTHENTICATED
        assert await echo(channel, token="third-token") == b"x"
        replaced(tokens, "\n")
        assert await echo(channel, token="third-token") == b"x"
        replaced(tokens, None)
        assert await echo(channel, token="third-token") == b"x"
        assert await refusal(echo(channel, token="")) is UNAUTHENTICATED
    assert caplog.text.count("the old tokens stay") == 2


async def test_a_token_file_that_holds_none_stops_the_start(tmp_path: Path) -> None:
    """Fail closed: an empty file is no authentication, so it is an error."""
    empty = tmp_path / "tokens"
    empty.write_text("\n  \n# nothing\n")
    with pytest.raises(ConfigError, match=r"--auth-token-file: .*holds no token"):
        await GrpcServer(ServerOptions(auth_token_file=empty), StatusBoard()).bind()
    with pytest.raises(ConfigError, match="--auth-token-file: cannot read"):
        await GrpcServer(ServerOptions(auth_token_file=tmp_path / "gone"), StatusBoard()).bind()


@pytest.mark.parametrize("token", ["pässwörd", "tab\tbed", "bell\x07"])
async def test_a_token_that_nobody_can_send_stops_the_start(tmp_path: Path, token: str) -> None:
    """It would close the server to everybody; the token itself is not repeated."""
    file = tmp_path / "tokens"
    file.write_text(f"# ours\ngood\n{token}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--auth-token-file: .*line 3 holds char") as refused:
        await GrpcServer(ServerOptions(auth_token_file=file), StatusBoard()).bind()
    with pytest.raises(ConfigError, match="--api-key: holds characters"):
        await GrpcServer(ServerOptions(auth_tokens=(token,)), StatusBoard()).bind()
    assert token not in str(refused.value)


async def test_a_byte_order_mark_is_no_part_of_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"\xef\xbb\xbfgood token\r\n")
    async with (
        up(ServerOptions(auth_token_file=file)) as address,
        grpc.aio.insecure_channel(str(address), options=LOCAL) as channel,
    ):
        assert await echo(channel, token="good token") == b"x"
