"""Brings vLLM's AsyncLLM up beside the event loop, and takes it down again.

Loading blocks for seconds to minutes, so it runs on a thread of its own and the port goes on
answering; vLLM then starts its output tasks at the first call on the loop, which `start` makes.
What is built, and from what, is exactly what the launcher itself builds.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import multiprocessing
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol, TypeVar

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.requests import RequestTable

log = logging.getLogger(__name__)

T = TypeVar("T")

ABANDON_SECONDS = 3.0
"""How long a load that nobody waits for any more may take to notice that its engine is gone."""

LISTENER_SECONDS = 1.0


class LauncherChanged(Exception):
    """This vLLM's launcher is not as we know it; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """What the launcher builds its engine from: the names its own module imported."""

    engine_args: Any
    async_llm: Any
    usage: Any
    envs: Any
    version: str

    @classmethod
    def of(cls, stock: FunctionType) -> Launcher:
        """:raises LauncherChanged: a name is not there, or takes other arguments."""
        names = stock.__globals__
        try:
            launcher = cls(
                names["AsyncEngineArgs"],
                names["AsyncLLM"],
                names["UsageContext"].OPENAI_API_SERVER,
                names["envs"],
                names["VLLM_VERSION"],
            )
            made = inspect.signature(launcher.async_llm.from_vllm_config)
            made.bind(**launcher._arguments(argparse.Namespace(**_UNKNOWN), None))
            inspect.signature(launcher.engine_args.from_cli_args).bind(None)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise LauncherChanged(f"{type(error).__name__}: {error}") from error
        return launcher

    def build(self, args: argparse.Namespace) -> Any:
        """The engine of a command line. Blocks; returns when it could serve."""
        config = self.engine_args.from_cli_args(args).create_engine_config(usage_context=self.usage)
        async_llm = self.async_llm.from_vllm_config(**self._arguments(args, config))
        # vLLM looks a variable up for every output of a request, 5 % of this process's time; its
        # engine process does this too.
        remember = getattr(self.envs, "enable_envs_cache", None)
        if remember is not None:
            remember()
        return async_llm

    def _arguments(self, args: argparse.Namespace, config: Any) -> dict[str, Any]:
        return {
            "vllm_config": config,
            "usage_context": self.usage,
            "enable_log_requests": args.enable_log_requests,
            "disable_log_stats": args.disable_log_stats,
        }


_UNKNOWN = {"enable_log_requests": False, "disable_log_stats": False}


class Served(Protocol):
    """What a servicer is to its engine's life."""

    engine: Engine
    table: RequestTable

    async def close(self) -> None: ...


WarmUp = Callable[[Any, Engine], Awaitable[None]]
"""Warms up an engine over an `AsyncLLM`."""


class EngineLife:
    """The steps of a `core.server.Life`. `serve` makes the servicer of an engine."""

    def __init__(
        self,
        build: Callable[[], Any],
        serve: Callable[[Any], Served],
        *,
        stats_seconds: float | None,
        warm_up: WarmUp | None = None,
    ) -> None:
        self._build = build
        self._serve = serve
        self._stats_seconds = stats_seconds
        self._warm_up = warm_up
        self._loading: Future[Any] | None = None
        self._async_llm: Any = None
        self._served: Served | None = None
        self._stats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._loading = on_thread(self._build, "vllm-load")
        self._async_llm = await asyncio.wrap_future(self._loading)
        # A round trip to the engine's process, and vLLM listens to it from here on.
        await self._async_llm.get_supported_tasks()
        self._served = self._serve(self._async_llm)
        await self._served.engine.start()
        if self._stats_seconds is not None:
            self._stats = asyncio.create_task(self._log_stats(self._stats_seconds))

    async def warm_up(self) -> None:
        assert self._served is not None
        if self._warm_up is not None:
            await self._warm_up(self._async_llm, self._served.engine)

    def cut(self, error: Exception) -> None:
        if self._served is not None:
            self._served.table.cut_all(error)

    async def close(self) -> None:
        if self._stats is not None:
            self._stats.cancel()
        if self._served is not None:
            await self._served.close()
        if self._async_llm is not None:
            await _stop_listening(self._async_llm)
            await asyncio.wrap_future(on_thread(self._async_llm.shutdown, "vllm-shutdown"))
        elif self._loading is not None and not _failed(self._loading):
            await self._abandon(self._loading)

    def kill(self) -> None:
        """End the engine's processes at once; their workers go with them."""
        for child in multiprocessing.active_children():
            child.kill()

    async def _abandon(self, loading: Future[Any]) -> None:
        """The load cannot be told to stop; without its engine processes it fails by itself."""
        loading.add_done_callback(_shut_down_late)
        for child in multiprocessing.active_children():
            child.terminate()
        waiting = asyncio.wrap_future(loading)
        await asyncio.wait({waiting}, timeout=ABANDON_SECONDS)
        if waiting.done():
            log.info("the load was given up: %s", waiting.exception() or "it had just ended")
        else:
            waiting.cancel()
            self.kill()

    async def _log_stats(self, seconds: float) -> None:
        """The line of engine figures that vLLM's own launcher has logged now and then."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._async_llm.do_log_stats()
            except Exception:
                log.exception("cannot log the engine's figures")


def on_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run `call` on a thread that does not keep the process; its result, to be waited for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a waiter that gives up does not cancel it

    def run() -> None:
        try:
            result = call()
        except SystemExit as error:
            # Let through, it would end the thread alone and leave the waiter waiting.
            future.set_exception(RuntimeError(f"it asked to exit with {error.code!r}"))
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def _stop_listening(async_llm: Any) -> None:
    """vLLM does it only after its engine has ended, whose death it would log with a traceback."""
    task = getattr(async_llm, "output_handler", None)
    if isinstance(task, asyncio.Future):
        task.cancel()
        await asyncio.wait({task}, timeout=LISTENER_SECONDS)


def _failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _shut_down_late(loading: Future[Any]) -> None:
    if not _failed(loading):
        loading.result().shutdown()
