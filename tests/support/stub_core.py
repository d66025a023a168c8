"""An engine core of vLLM's without vLLM: its ZMQ wire, tokens from a counter, faults to choose.

Run as `python -m tests.support.stub_core --handshake URL`; needs pyzmq and msgspec only. What it
does not say on the wire it prints: `at POINT` when it reaches one of POINTS.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

POINTS = ("hello", "ready", "registered", "token")
"""Before it says HELLO, before it says READY, once it is connected, after its first token."""
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
STOP, LENGTH, ABORTED = 0, 1, 2
FIRST_TOKEN = 1000

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(ext_hook=lambda code, data: bytes(data)).decode


class Output(msgspec.Struct, array_like=True):
    """The head of `EngineCoreOutput`; the rest of it has defaults."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs: None = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    call_id: int
    failure: str | None
    result: tuple[str | None, object]


class Outputs(msgspec.Struct, array_like=True):
    """The head of `EngineCoreOutputs`."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None


@dataclass
class Running:
    """A request that gets one token a step."""

    request_id: str
    limit: int
    stops: frozenset[int]
    given: int = 0

    def step(self) -> Output:
        token = FIRST_TOKEN + self.given
        self.given += 1
        if token in self.stops:
            return Output(self.request_id, [token], finish_reason=STOP, stop_reason=token)
        over = LENGTH if self.given >= self.limit else None
        return Output(self.request_id, [token], finish_reason=over)


class Core:
    """One connected engine core."""

    def __init__(self, options: argparse.Namespace, context: zmq.Context[Any]) -> None:
        self._options = options
        self._context = context
        self._running: dict[str, Running] = {}
        self._input, self._output = self._connect()
        self._given = 0

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        identity = struct.pack("<H", self._options.index)
        if self._options.direct:
            return self._register(identity, *self._options.direct)
        self._at("hello")
        handshake = self._dealer(identity, self._options.handshake)
        status = {"local": True, "headless": True}
        handshake.send(_pack({"status": "HELLO", **status}))
        init = _unpack(handshake.recv_multipart()[-1])
        self._at("ready")
        handshake.send(_pack({"status": "READY", **status, "parallel_config_hash": None}))
        addresses = init["addresses"]
        sockets = self._register(identity, addresses["inputs"][0], addresses["outputs"][0])
        # What is written stays in the queue when a socket closes, so nothing is lost here.
        handshake.close()
        self._at("registered")
        return sockets

    def _register(
        self, identity: bytes, input_url: str, output_url: str
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        inputs = self._dealer(identity, input_url)
        inputs.send(_pack(registration(self._options.index)))
        outputs: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        outputs.connect(output_url)
        return inputs, outputs

    def _dealer(self, identity: bytes, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(address)
        return socket

    def _at(self, point: str) -> None:
        print(f"at {point}", flush=True)
        if self._options.die_at == point:
            self._die()
        if self._options.hang_at == point:
            while True:
                time.sleep(3600)
        if self._options.slow and point == "hello":
            self._work(self._options.slow)

    def _die(self) -> None:
        if self._options.how == "sentinel":
            self._output.send(b"ENGINE_CORE_DEAD")
            self._context.destroy(linger=1000)
        if self._options.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(self._options.code)

    @staticmethod
    def _work(seconds: float) -> None:
        """As an engine that loads: busy now and then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            busy = time.monotonic() + 0.02
            while time.monotonic() < busy:
                pass
            time.sleep(0.1)

    def run(self) -> None:
        pace = self._options.pace
        while True:
            wait = None if not self._running or self._options.mute else pace * 1000
            while self._input.poll(wait):
                self._take(self._input.recv_multipart())
                wait = 0
            if self._running and not self._options.mute:
                self._step()

    def _take(self, frames: list[bytes]) -> None:
        kind, payload = frames[0], _unpack(frames[1])
        if kind == ADD:
            self._add(payload)
        elif kind == ABORT:
            known = [each for each in payload if self._running.pop(each, None) is not None]
            self._send(Outputs(outputs=[Output(r, [], finish_reason=ABORTED) for r in known]))
        elif kind == UTILITY:
            _, call, method, _ = payload
            answers = {"get_supported_tasks": ["generate"], "reset_prefix_cache": True}
            result = (None, answers.get(method))
            self._send(Outputs(utility_output=UtilityOutput(call, None, result)))

    def _add(self, request: list[Any]) -> None:
        request_id, parameters = request[0], request[3] or {}
        if request[4] is not None:
            self._send(Outputs(outputs=[Output(request_id, [], finish_reason=STOP)]))
            return
        stops = frozenset(parameters.get("stop_token_ids") or ())
        limit = parameters.get("max_tokens") or 16
        self._running[request_id] = Running(request_id, limit, stops)

    def _step(self) -> None:
        outputs = [running.step() for running in self._running.values()]
        over = [each.request_id for each in outputs if each.finish_reason is not None]
        for request_id in over:
            del self._running[request_id]
        self._send(Outputs(outputs=outputs, finished_requests=over or None))
        if not self._given and self._options.die_at == "token":
            self._at("token")
        self._given += 1

    def _send(self, outputs: Outputs) -> None:
        outputs.engine_index = self._options.index
        outputs.timestamp = time.monotonic()
        self._output.send(_pack(outputs))


def registration(index: int) -> dict[str, object]:
    """`EngineCoreReadyResponse` of vLLM 0.32, as a small model would have it."""
    return {
        "max_model_len": 4096,
        "num_gpu_blocks": 1000,
        "block_size": 16,
        "dp_stats_address": None,
        "dtype": "bfloat16",
        "vllm_version": "0.32.0",
        "world_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": index,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "instance_id": "stub",
        "supports_lora": False,
        "max_loras": 0,
        "mamba_block_size": None,
        "kv_cache_size_tokens": 16000,
        "kv_cache_max_concurrency": 4.0,
        "kv_events_config": None,
        "weight_transfer_backend": None,
        "enable_sleep_mode": False,
        "supports_draft_weight_updates": False,
        "effective_attention_block_size": 16,
    }


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--handshake")
    parser.add_argument("--direct", nargs=2, help="the two sockets, without a handshake")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds of work before HELLO")
    parser.add_argument("--mute", action="store_true", help="take requests, answer none")
    parser.add_argument("--die-at", choices=POINTS)
    parser.add_argument("--hang-at", choices=POINTS)
    parser.add_argument("--how", choices=("exit", "kill", "sentinel"), default="exit")
    parser.add_argument("--code", type=int, default=7, help="the exit code when it dies")
    parser.add_argument("--stubborn", action="store_true", help="SIGTERM is ignored")
    parser.add_argument("--helper", choices=("here", "apart"), help="start one that stays")
    return parser.parse_args(argv)


def run(given: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if given.stubborn else _end)
    if given.helper:
        # Deaf to SIGTERM, perhaps in a session of its own, as a compiler's server may be.
        command = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        helper = subprocess.Popen(
            [sys.executable, "-c", command], start_new_session=given.helper == "apart"
        )
        print(f"helper {helper.pid}", flush=True)
    with zmq.Context() as context:
        context.linger = 0
        Core(given, context).run()
    return 0


def _end(number: int, _frame: object) -> None:
    os._exit(0)


if __name__ == "__main__":
    sys.exit(run(options()))
