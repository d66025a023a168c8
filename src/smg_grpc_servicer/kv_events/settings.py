"""The variables of KV events, and the relay that they describe.

Options of every launch are made of them, so nothing here imports pyzmq or msgspec by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.settings import Setting, Settings
from smg_grpc_servicer.kv_events.endpoints import Source
from smg_grpc_servicer.kv_events.history import DEFAULT_BATCHES, DEFAULT_BYTES

if TYPE_CHECKING:
    from smg_grpc_servicer.kv_events.relay import Relay

HISTORY_BATCHES = Setting(
    "kv_event_history_batches",
    parsers.POSITIVE_INT,
    DEFAULT_BATCHES,
    "batches of KV events kept per rank for subscribers that come back",
    env="SMG_KV_EVENT_HISTORY_BATCHES",
)
HISTORY_BYTES = Setting(
    "kv_event_history_bytes",
    parsers.BYTES,
    DEFAULT_BYTES,
    "bytes those batches may take per rank",
    env="SMG_KV_EVENT_HISTORY_BYTES",
)
HISTORY = Settings(HISTORY_BATCHES, HISTORY_BYTES)


def switch(engine: str) -> Setting[bool]:
    """Whether an engine that was given no publisher gets one; named as in its variables."""
    return Setting(
        "kv_events",
        parsers.BOOLEAN,
        True,
        "publish KV events when the engine's own flags do not say",
        env=f"SMG_{engine.upper()}_SERVICER_KV_EVENTS",
    )


def relay(sources: Sequence[Source], environ: Mapping[str, str] | None = None) -> Relay:
    """A started relay.

    :raises ConfigError: a variable or an endpoint cannot work.
    """
    from smg_grpc_servicer.kv_events import hash_check
    from smg_grpc_servicer.kv_events.relay import Relay

    values = HISTORY.resolve(environ=environ)
    made = Relay(
        sources,
        batches=values.get_value(HISTORY_BATCHES),
        limit_bytes=values.get_value(HISTORY_BYTES),
        check=hash_check.make(environ),
    )
    made.start()
    return made
