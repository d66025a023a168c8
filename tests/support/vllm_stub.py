"""A `vllm` package with nothing in it but what its launchers touch, in a child process.

Modules that are not there as files are made up: a name that `NAMES` has is that, any other is an
empty class. The engine is a stand-in that loads until the test says so, and the servicer over it
answers from the FakeEngine. What the child is told stands in its environment:

- STUB_LOAD: a FIFO; the engine has loaded when the other end wrote `ok`, and fails on other words
- STUB_CHANGED: the launcher's engine is made another way than it is today
- STUB_CORE: flags of `stub_core`, which a headless engine is
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.vllm_config import vllm_config

log = logging.getLogger(__name__)


def install() -> None:
    """Make up what is missing from here on."""
    sys.meta_path.append(Finder())
    logging.basicConfig(level="INFO", stream=sys.stderr)


class MadeUp(ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NAMES:
            raise AttributeError(name)
        value = NAMES[name]() if name in NAMES else type(name, (), {})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last one to be asked for a module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("vllm.") or fullname == "vllm.entrypoints.launchers.grpc_server":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MadeUp(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class AsyncEngineArgs:
    """As vLLM's: making flags loads the plugins."""

    data_parallel_hybrid_lb = False
    disable_log_stats = False

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        parser.add_argument("--model", default="stub-model")
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction)
        parser.add_argument("--disable-log-stats", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> AsyncEngineArgs:
        return cls(vars(args))

    def create_engine_config(self, usage_context: object, headless: bool = False) -> Any:
        parallel = {
            "node_rank_within_dp": 0,
            "data_parallel_rank": 0,
            "data_parallel_size_local": self.given.get("data_parallel_size_local", 1),
            "data_parallel_master_ip": self.given.get("data_parallel_address"),
            "data_parallel_rpc_port": self.given.get("data_parallel_rpc_port"),
        }
        return vllm_config(
            usage=usage_context,
            shutdown_timeout=0,
            model_config__model=self.given["model"],
            model_config__tokenizer=str(Path(__file__).parent),  # has none
            **{f"parallel_config__{name}": value for name, value in parallel.items()},
        )


class AsyncLLM:
    """Loads for as long as the test wants."""

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
    ) -> AsyncLLM:
        assert vllm_config.usage == usage_context == "openai"
        said = Path(os.environ["STUB_LOAD"]).read_text() if "STUB_LOAD" in os.environ else "ok"
        if said != "ok":
            raise RuntimeError(said)
        made = cls()
        made.vllm_config = vllm_config
        return made

    def __init__(self) -> None:
        self.vllm_config: Any = None
        self.engine_core = SimpleNamespace(engine_ranks_managed=[0])

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def do_log_stats(self) -> None:
        log.info("figures of the stub")

    def shutdown(self) -> None:
        log.info("the stub engine is shut down")


class ChangedAsyncLLM(AsyncLLM):
    @classmethod
    def from_vllm_config(  # type: ignore[override] # that is what changed
        cls, vllm_config: Any, usage_context: object, recipe: object
    ) -> AsyncLLM:
        raise AssertionError("nobody knows how to call this")


class EngineCoreProc:
    """A headless engine; what is checked in it are names."""

    def preprocess_add_request(self, request: object) -> object:
        raise AssertionError("the stub core reads its requests itself")

    process_input_sockets = _handle_request_preproc_error = preprocess_add_request

    @staticmethod
    def run_engine_core(*, handshake_address: str, dp_rank: int, **_: object) -> None:
        from tests.support import stub_core

        given = shlex.split(os.environ.get("STUB_CORE", ""))
        command = ["--handshake", handshake_address, "--index", str(dp_rank), *given]
        stub_core.run(stub_core.options(command))


class CoreEngineProcManager:
    """As vLLM's: starts engines in new processes, and ends all when one has ended."""

    failed_proc_name: str | None = None

    def __init__(self, *, local_engine_count: int, handshake_address: str, **_: object) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        self._processes = [
            get_context("spawn").Process(
                target=EngineCoreProc.run_engine_core,
                name=f"EngineCore_DP{rank}",
                kwargs={"handshake_address": handshake_address, "dp_rank": rank},
            )
            for rank in range(local_engine_count)
        ]
        for process in self._processes:
            process.start()

    def monitor_engine_liveness(self) -> None:
        first, *_ = wait([process.sentinel for process in self._processes])
        (ended,) = (process for process in self._processes if process.sentinel == first)
        if ended.exitcode != 0:  # None, when it is just about to end
            self.failed_proc_name = ended.name
        self.shutdown()

    def finished_procs(self) -> dict[str, int]:
        codes = {process.name: process.exitcode for process in self._processes}
        return {name: code for name, code in codes.items() if code is not None}

    def shutdown(self, timeout: float | None = None) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _async_llm() -> type[AsyncLLM]:
    """The launcher asks for it after it has imported our servicer: then ours is replaced."""
    from smg_grpc_servicer.vllm import servicer

    vars(servicer)["VllmEngineServicer"] = fake_servicer
    return ChangedAsyncLLM if "STUB_CHANGED" in os.environ else AsyncLLM


def fake_servicer(async_llm: AsyncLLM, start_time: float, **options: Any) -> Any:
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from smg_grpc_servicer.core.servicer import CoreServicer
    from smg_grpc_servicer.testing import FakeEngine
    from smg_grpc_servicer.vllm.wire import VllmWire

    class Servicer(CoreServicer, vllm_engine_pb2_grpc.VllmEngineServicer):
        wire = VllmWire()

        async def close(self) -> None:
            await self.engine.close()

    assert isinstance(async_llm, AsyncLLM)
    return Servicer(FakeEngine(), options.pop("board"), **options)


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`vllm serve`: the flags that a gRPC launch minds."""
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--reasoning-parser-plugin", default="")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--api-key", nargs="*")
    for name in ("keyfile", "certfile", "ca-certs", "ciphers"):
        parser.add_argument(f"--ssl-{name}")
    parser.add_argument("--ssl-cert-reqs", type=int, default=0)
    return AsyncEngineArgs.add_cli_args(parser)


def _no_logo(logger: logging.Logger, version: str, model: str) -> None:
    logger.info("stub of vLLM %s", version)


def _plugins() -> list[str] | None:
    given = os.environ.get("VLLM_PLUGINS")
    return None if given is None else given.split(",")


NAMES: dict[str, Callable[[], Any]] = {
    "AsyncEngineArgs": lambda: AsyncEngineArgs,
    "AsyncLLM": _async_llm,
    "CoreEngineProcManager": lambda: CoreEngineProcManager,
    "EngineCoreProc": lambda: EngineCoreProc,
    "Executor": lambda: SimpleNamespace(get_class=lambda config: None),
    "UsageContext": lambda: SimpleNamespace(OPENAI_API_SERVER="openai"),
    "VLLM_LOG_STATS_INTERVAL": lambda: 10.0,
    "VLLM_PLUGINS": _plugins,
    "VLLM_SUBCMD_PARSER_EPILOG": lambda: "{subcmd}",
    "__version__": lambda: "stub",
    "configure_logging_from_args": lambda: lambda args: None,
    "get_tcp_uri": lambda: lambda host, port: f"tcp://{host}:{port}",
    "init_logger": lambda: logging.getLogger,
    "log_version_and_model": lambda: _no_logo,
    "make_arg_parser": lambda: make_arg_parser,
    "propagate_flash_late_interaction": lambda: lambda args, engine_args: None,
}


def vllm() -> None:
    """The program `vllm`, as far as `vllm serve` goes."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vLLM CLI")
    commands = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands).set_defaults(dispatch_function=command.cmd)
    args = parser.parse_args()
    args.dispatch_function(args)


if __name__ == "__main__":
    vllm()
