"""KV events of SGLang: a publisher when none was asked for, where its ranks publish, the service.

SGLang's own rules (`ZmqEventPublisher` of 0.5.20 to 0.5.23): `bind` decides where it is set, else
it binds what has a wildcard in it, ipc and inproc, and connects to anything else; a rank is added
to the port.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.core.errors import ConfigError, Unsupported
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.sglang import facts

if TYPE_CHECKING:
    from smg_grpc_servicer.kv_events.endpoints import Source
    from smg_grpc_servicer.kv_events.sampler import LoadSampler
    from smg_grpc_servicer.kv_events.service import KvEventService

log = logging.getLogger(__name__)

NONE = Unsupported("SGLang", "KV events without a publisher (set --kv-events-config)")

WHO = "smg-grpc-servicer"
_BINDS = ("*", "::", "0.0.0.0")  # noqa: S104 - compared, not bound


def configure(server_args: Any, config: Any, environ: Mapping[str, str] | None = None) -> None:
    """Give a launch without `--kv-events-config` a publisher; one that was given stays as it is.

    Before SGLang publishes its configuration. Its record is sealed by then, so the decision is
    declared beside it, as SGLang's own are.

    :raises ConfigError: there are no ports for it.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    if config.kv_events_config:
        return
    if config.disable_radix_cache:
        log.info("KV events are off: --disable-radix-cache leaves nothing to tell")
        return
    made = auto.publisher("sglang", facts.num_ranks(config), environ=environ)
    if made is not None:
        keys = {name: value for name, value in made.config().items() if name in _keys()}
        declare_resolution(server_args, WHO, kv_events_config=json.dumps(keys))


def sources(config: Any) -> tuple[Source, ...]:
    """Where the ranks' events are to be had; empty when SGLang publishes none.

    :raises ConfigError: nobody could subscribe to what is configured.
    """
    from smg_grpc_servicer.kv_events.endpoints import source

    if not config.kv_events_config or config.disable_radix_cache:
        return ()
    from sglang.srt.disaggregation.kv_events import KVEventsConfig

    told = KVEventsConfig.from_cli(config.kv_events_config)
    if told.publisher != "zmq":
        return ()
    binds = told.bind if "bind" in _keys() else None  # new in 0.5.22
    return tuple(
        source(
            rank,
            told.endpoint,
            told.replay_endpoint if told.buffer_steps else None,
            binds=_binds(told.endpoint) if binds is None else binds,
            topic=told.topic,
            hwm=told.hwm,
        )
        for rank in range(facts.num_ranks(config))
    )


def service(
    config: Any,
    sampler: Callable[[], LoadSampler],
    board: StatusBoard,
) -> KvEventService | None:
    """The running service; None when there is nothing to subscribe to. On the event loop."""
    from smg_grpc_servicer.kv_events.service import KvEventService
    from smg_grpc_servicer.kv_events.settings import relay

    try:
        found = sources(config)
        if not found:
            return None
        started = relay(found)
    except ConfigError as error:
        log.error("KV events are off: %s", error)
        return None
    return KvEventService(started, board, loads=sampler())


def sampler(
    engine: Any, table: RequestTable, signs: Callable[[], list[float | None]]
) -> LoadSampler:
    """Load records from the engine's reports.

    :param signs: when the scheduler last showed that it works, by kind of sign.
    """
    from smg_grpc_servicer.kv_events.loads import Activity, silence
    from smg_grpc_servicer.kv_events.sampler import LoadSampler

    def activity() -> Activity:
        outputs = [table.last_output, *signs()]
        # Its schedulers report after every step of a prefill and every few of a decode.
        silent = silence(table.streaming_since, outputs, time.monotonic())
        return Activity(silent, True, engine.pending_prompt_tokens)

    return LoadSampler(engine.loads, activity)


def _keys() -> frozenset[str]:
    """What this release's configuration has."""
    from sglang.srt.disaggregation.kv_events import KVEventsConfig

    return frozenset(KVEventsConfig.model_fields)


def _binds(endpoint: str) -> bool:
    return endpoint.startswith(("ipc://", "inproc://")) or any(s in endpoint for s in _BINDS)
