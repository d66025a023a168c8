"""A server child for `kv_events.py`: this interpreter's `VllmEngineServicer` over a vLLM without
an engine. Arguments: the publisher's endpoint. Prints `PORT n` when it listens.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


class Module(ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (MagicMock,), {}) if name[0].isupper() else MagicMock()
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up `vllm` and what engines bring along."""

    NAMES = ("vllm", "torch", "transformers", "tokenizers", "uvloop")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def engine(endpoint: str) -> Any:
    """An `AsyncLLM` as far as the relay asks."""
    from tests.support.vllm_config import vllm_config

    config = vllm_config()
    config.kv_events_config = SimpleNamespace(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=1_000_000,
        max_queue_size=100_000,
        topic="",
    )
    llm = MagicMock()
    llm.vllm_config = config
    llm.model_config = config.model_config
    llm.errored = False
    llm.is_running = True
    llm.output_handler = None
    llm.logger_manager = None
    llm.engine_core = SimpleNamespace()
    llm.get_kv_event_sources = dict
    return llm


async def main() -> None:
    """Serve until the parent closes standard input."""
    import grpc
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    sys.meta_path.append(Finder())
    from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

    servicer = VllmEngineServicer(engine(sys.argv[1]), time.time())
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"PORT {port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
