"""KV events of vLLM: a publisher when none was asked for, where its ranks publish, the service.

vLLM's own rules (`ZmqEventPublisher`): it binds an endpoint with `*` or `::` and connects to any
other, adds the rank to the port, and can report per rank what came of that.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.core.errors import ConfigError, Unsupported
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.vllm.probe import probe

if TYPE_CHECKING:
    from smg_grpc_servicer.kv_events.endpoints import Source
    from smg_grpc_servicer.kv_events.service import KvEventService
    from smg_grpc_servicer.vllm.adapter import VllmEngine

log = logging.getLogger(__name__)

NONE = Unsupported("vLLM", "KV events without a publisher (set --kv-events-config)")


def configure(
    args: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    *,
    binds: bool = False,
) -> None:
    """Give a launch without `--kv-events-config` a publisher; one that was given stays as it is.

    :param binds: who subscribes cannot bind, so each rank has to bind its own publisher. Several
        ranks can do so only on every interface of the host, which is left to an operator to ask.
    :raises ConfigError: there are no ports for it.
    """
    given = vars(args)
    if given.get("kv_events_config", True):
        return
    if given.get("enable_prefix_caching") is False:
        log.info("KV events are off: --no-enable-prefix-caching leaves nothing to tell")
        return
    ranks = given.get("data_parallel_size")
    if binds and isinstance(ranks, int) and ranks > 1:
        log.info("KV events of %d ranks are off: --kv-events-config sets a publisher", ranks)
        return
    made = auto.publisher("vllm", ranks if isinstance(ranks, int) else 1, environ=environ)
    if made is not None:
        from vllm.config import KVEventsConfig

        args.kv_events_config = KVEventsConfig(**made.config())


def sources(async_llm: Any, ranks: tuple[int, ...]) -> tuple[Source, ...]:
    """Where the ranks' events are to be had; empty when vLLM publishes none.

    :raises ConfigError: nobody could subscribe to what is configured.
    """
    from smg_grpc_servicer.kv_events.endpoints import source

    config: Any = probe(async_llm, "vllm_config.kv_events_config")
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return ()
    report = getattr(async_llm, "get_kv_event_sources", None)  # new in 0.32
    reported = report() if report is not None else {}
    made = []
    for rank in ranks:
        own = reported.get(rank)
        at = config if own is None else own
        made.append(
            source(
                rank,
                at.endpoint,
                at.replay_endpoint if config.buffer_steps else None,
                resolved=own is not None,
                # What was made of a wildcard port does not look like one any more.
                binds=_binds(config.endpoint),
                topic=config.topic,
                hwm=config.hwm,
            )
        )
    return tuple(made)


def service(
    async_llm: Any, engine: VllmEngine, table: RequestTable, board: StatusBoard
) -> KvEventService | None:
    """The running service; None when there is nothing to subscribe to. On the event loop."""
    try:
        found = sources(async_llm, engine.requests.limits.ranks)
        if not found:
            return None
        # pyzmq and msgspec come with vLLM, not with us.
        from smg_grpc_servicer.kv_events.loads import Activity, silence
        from smg_grpc_servicer.kv_events.sampler import LoadSampler
        from smg_grpc_servicer.kv_events.service import KvEventService
        from smg_grpc_servicer.kv_events.settings import relay

        started = relay(found)
    except ConfigError as error:
        log.error("KV events are off: %s", error)
        return None

    def activity() -> Activity:
        stats = engine.stats
        return Activity(
            silence(table.streaming_since, (table.last_output, stats.last_step), time.monotonic()),
            stats.attached,
            engine.pending_prompt_tokens,
        )

    return KvEventService(started, board, loads=LoadSampler(engine.loads, activity))


def _binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


__all__ = ["NONE", "configure", "service", "sources"]
