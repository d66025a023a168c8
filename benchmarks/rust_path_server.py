"""The Python path of `rust_path.py`: vLLM's AsyncLLM over the stub core, our servicer over it.

`rust_path_server.py MODEL FOLDER` prints its address when it serves and ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import grpc
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from smg_grpc_servicer.core.binding import channel_options
from smg_grpc_servicer.rust import child
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
from tests.support import stub_core


async def main(model: str, folder: Path, *flags: str) -> None:
    urls = [f"ipc://{folder / name}" for name in ("in.sock", "out.sock")]
    engine = child.start(stub_core.run, stub_core.options(["--direct", *urls, *flags]))
    usage = UsageContext.OPENAI_API_SERVER
    arguments = AsyncEngineArgs(model=model, max_model_len=4096, max_num_seqs=256)
    llm = AsyncLLM.from_vllm_config(
        vllm_config=arguments.create_engine_config(usage_context=usage),
        usage_context=usage,
        disable_log_stats=True,
        client_addresses={"input_address": urls[0], "output_address": urls[1]},
    )
    server = grpc.aio.server(options=channel_options(-1, -1))
    servicer = VllmEngineServicer(llm, time.time())
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"serving on grpc://127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)
    llm.shutdown()
    engine.kill()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
