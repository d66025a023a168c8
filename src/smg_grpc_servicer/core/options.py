"""The settings every server of ours has, and what they come to.

Durations are seconds, sizes bytes. Each variable is `SMG_SERVICER_<NAME>`; the metrics ones carry
the engine's name, `SMG_<ENGINE>_SERVICER_METRICS_PORT`, as the published package has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import STALL_SECONDS
from smg_grpc_servicer.core.pace import LONGEST
from smg_grpc_servicer.core.settings import Setting, Settings, Values
from smg_grpc_servicer.core.tls import TlsFiles

HOST = Setting(
    "host",
    parsers.HOST,
    "127.0.0.1",
    "address to listen on; 0.0.0.0 or :: for every interface",
    "--host",
    "SMG_SERVICER_HOST",
)
PORT = Setting(
    "port",
    parsers.PORT,
    50051,
    "port to listen on; 0 takes a free one",
    "--port",
    "SMG_SERVICER_PORT",
)
TLS_CERT: Setting[Path | None] = Setting(
    "tls_cert",
    parsers.FILE,
    None,
    "PEM certificate chain; turns TLS on; read again when it changes",
    "--tls-cert",
    "SMG_SERVICER_TLS_CERT",
)
TLS_KEY: Setting[Path | None] = Setting(
    "tls_key",
    parsers.FILE,
    None,
    "PEM private key of --tls-cert, not encrypted",
    "--tls-key",
    "SMG_SERVICER_TLS_KEY",
)
TLS_CLIENT_CA: Setting[Path | None] = Setting(
    "tls_client_ca",
    parsers.FILE,
    None,
    "PEM certificates of the authorities whose clients are let in; turns mutual TLS on",
    "--tls-client-ca",
    "SMG_SERVICER_TLS_CLIENT_CA",
)
AUTH_TOKEN_FILE: Setting[Path | None] = Setting(
    "auth_token_file",
    parsers.FILE,
    None,
    "file of bearer tokens, one a line; every call but health needs one of them",
    "--auth-token-file",
    "SMG_SERVICER_AUTH_TOKEN_FILE",
)
DRAIN_SECONDS = Setting(
    "drain_seconds",
    parsers.SECONDS,
    20.0,
    "how long running requests may go on after SIGTERM",
    "--drain-seconds",
    "SMG_SERVICER_DRAIN_SECONDS",
)
STALL = Setting(
    "stall_seconds",
    parsers.SECONDS,
    STALL_SECONDS,
    "silence of a busy engine after which it is not ready; 0 = never",
    "--stall-seconds",
    "SMG_SERVICER_STALL_SECONDS",
)
EXIT_ON_DEATH = Setting(
    "exit_on_engine_death_seconds",
    parsers.SECONDS,
    10.0,
    "after the engine died, how long open streams may take to end before the process exits "
    "with code 1; 0 = stay up, not alive",
    "--exit-on-engine-death-seconds",
    "SMG_SERVICER_EXIT_ON_ENGINE_DEATH_SECONDS",
)
MAX_MESSAGE_BYTES = Setting(
    "max_message_bytes",
    parsers.BYTES_INT32,
    512 * 2**20,
    "largest message, request or answer; what is larger ends RESOURCE_EXHAUSTED",
    "--max-message-bytes",
    "SMG_SERVICER_MAX_MESSAGE_BYTES",
)
MAX_CONCURRENT_RPCS: Setting[int | None] = Setting(
    "max_concurrent_rpcs",
    parsers.POSITIVE_INT32,
    None,
    "calls served at once, health included; more end RESOURCE_EXHAUSTED; no bound when not set",
    "--max-concurrent-rpcs",
    "SMG_SERVICER_MAX_CONCURRENT_RPCS",
)
MAX_CHUNK_TOKENS: Setting[int | None] = Setting(
    "max_chunk_tokens",
    parsers.POSITIVE_INT,
    None,
    "most tokens in one message of a stream; no bound when not set: what piled up travels together",
    "--max-chunk-tokens",
    "SMG_SERVICER_MAX_CHUNK_TOKENS",
)
COALESCE_SECONDS = Setting(
    "coalesce_seconds",
    parsers.SECONDS,
    LONGEST,
    "longest that a stream's tokens wait for one another while the event loop lags; never a first "
    "token, an end or on an idle loop; 0 = never",
    "--coalesce-seconds",
    "SMG_SERVICER_COALESCE_SECONDS",
)
REFLECTION = Setting(
    "reflection",
    parsers.BOOLEAN,
    True,
    "answer server reflection, so that grpcurl needs no proto files",
    "--reflection",
    "SMG_SERVICER_REFLECTION",
)
EVENT_LOOP = Setting(
    "event_loop",
    parsers.one_of("auto", "asyncio", "uvloop"),
    "auto",
    "event loop; auto = uvloop when it is installed",
    "--event-loop",
    "SMG_SERVICER_EVENT_LOOP",
)
LOG_LEVEL = Setting(
    "log_level",
    parsers.one_of("debug", "info", "warning", "error"),
    "info",
    "least level that is logged",
    "--log-level",
    "SMG_SERVICER_LOG_LEVEL",
)
LOG_FORMAT = Setting(
    "log_format",
    parsers.one_of("text", "json"),
    "text",
    "log lines as text or as one JSON object each",
    "--log-format",
    "SMG_SERVICER_LOG_FORMAT",
)
METRICS_PORT: Setting[int | None] = Setting(
    "metrics_port",
    parsers.PORT,
    None,
    "port of the Prometheus endpoint; 0 takes a free one; off when not set",
    "--metrics-port",
)
METRICS_HOST: Setting[str | None] = Setting(
    "metrics_host",
    parsers.HOST,
    None,
    "address of the Prometheus endpoint; --host when not set",
    "--metrics-host",
)


def server_settings(
    engine: str,
    *,
    port: int = 50051,
    host: str = "127.0.0.1",
    max_message_bytes: int = MAX_MESSAGE_BYTES.default,
) -> Settings:
    """The standard group for one engine's server; `engine` as in its variables, for example mlx."""
    prefix = f"SMG_{engine.upper()}_SERVICER_METRICS"
    return Settings(
        replace(HOST, default=host),
        replace(PORT, default=port),
        TLS_CERT,
        TLS_KEY,
        TLS_CLIENT_CA,
        AUTH_TOKEN_FILE,
        DRAIN_SECONDS,
        STALL,
        EXIT_ON_DEATH,
        replace(MAX_MESSAGE_BYTES, default=max_message_bytes),
        MAX_CONCURRENT_RPCS,
        MAX_CHUNK_TOKENS,
        COALESCE_SECONDS,
        REFLECTION,
        replace(METRICS_PORT, env=f"{prefix}_PORT"),
        replace(METRICS_HOST, env=f"{prefix}_HOST"),
        LOG_LEVEL,
        LOG_FORMAT,
        EVENT_LOOP,
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server listens and how it ends; the defaults are those of the settings."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    auth_token_file: Path | None = None
    auth_tokens: tuple[str, ...] = field(default=(), repr=False)
    """Bearer tokens beside those of the file; for launchers whose flags carry them."""
    drain_seconds: float = DRAIN_SECONDS.default
    exit_on_engine_death_seconds: float = EXIT_ON_DEATH.default
    max_receive_bytes: int = MAX_MESSAGE_BYTES.default
    max_send_bytes: int = MAX_MESSAGE_BYTES.default
    max_concurrent_rpcs: int | None = None
    reflection: bool = True
    metrics_port: int | None = None
    metrics_host: str | None = None
    exit_guard_seconds: float = 8.0
    """After the drain, how long the rest of the shutdown may take before the process is ended."""

    @property
    def needs_token(self) -> bool:
        return self.auth_token_file is not None or bool(self.auth_tokens)

    @classmethod
    def from_values(cls, values: Values) -> ServerOptions:
        """:raises ConfigError: settings that contradict each other, all of them at once."""
        cert, key = values.get_value(TLS_CERT), values.get_value(TLS_KEY)
        client_ca = values.get_value(TLS_CLIENT_CA)
        port, metrics_port = values.get_value(PORT), values.get_value(METRICS_PORT)
        faults = []
        if cert is None and (key is not None or client_ca is not None):
            faults.append("--tls-cert: not given, but --tls-key or --tls-client-ca is")
        if cert is not None and key is None:
            faults.append("--tls-key: not given, but --tls-cert is")
        if metrics_port and metrics_port == port:
            faults.append(f"--metrics-port: got {port}, which is --port; allowed: another port")
        if faults:
            raise ConfigError("\n".join(faults))
        return cls(
            host=values.get_value(HOST),
            port=port,
            tls=TlsFiles(cert, key, client_ca) if cert is not None and key is not None else None,
            auth_token_file=values.get_value(AUTH_TOKEN_FILE),
            drain_seconds=values.get_value(DRAIN_SECONDS),
            exit_on_engine_death_seconds=values.get_value(EXIT_ON_DEATH),
            max_receive_bytes=values.get_value(MAX_MESSAGE_BYTES),
            max_send_bytes=values.get_value(MAX_MESSAGE_BYTES),
            max_concurrent_rpcs=values.get_value(MAX_CONCURRENT_RPCS),
            reflection=values.get_value(REFLECTION),
            metrics_port=metrics_port,
            metrics_host=values.get_value(METRICS_HOST),
        )
