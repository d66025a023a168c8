"""A scheduler of our own behind SGLang's sockets: its message classes, its sockets, no model.

It is told by the test what to say (`say`, on either socket), or generates by itself (`serve`):
one token per request and tick, aborts matched by prefix as SGLang's scheduler matches them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.utils.network import get_zmq_socket

SCALARS = ("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens")
LOGPROBS = tuple(
    f"{side}_{kind}_logprobs_{part}"
    for side in ("input", "output")
    for kind in ("token", "top", "token_ids")
    for part in ("val", "idx")
)


NOBODY = "nobody"
"""An abort of this id only shows that messages arrive."""


@dataclass
class Row:
    """One request's part of an output batch."""

    rid: str
    ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    prompt_tokens: int = 3
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: dict[str, Any] = field(default_factory=dict)
    """By column; the others are empty."""
    hidden: Any = None
    spec: tuple[int, int] | None = None
    """Verification steps, accepted drafts."""


def batch(*rows: Row) -> Any:
    """A `BatchTokenIDOutput` as the scheduler fills one."""
    scored = any(row.logprobs for row in rows)
    return io_struct.BatchTokenIDOutput(
        rids=[row.rid for row in rows],
        http_worker_ipcs=[None] * len(rows),
        finished_reasons=[row.finish for row in rows],
        decoded_texts=[""] * len(rows),
        decode_ids=[array("q", row.ids) for row in rows],
        read_offsets=[0] * len(rows),
        output_ids=[array("q", row.ids) for row in rows],
        skip_special_tokens=[True] * len(rows),
        spaces_between_special_tokens=[True] * len(rows),
        no_stop_trim=[False] * len(rows),
        **{name: [getattr(row, name) for row in rows] for name in SCALARS},
        **{
            name: [row.logprobs.get(name, []) for row in rows] if scored else None
            for name in LOGPROBS
        },
        output_token_entropy_val=None,
        output_hidden_states=[row.hidden for row in rows] if any(r.hidden for r in rows) else None,
        routed_experts=None,
        indexer_topk=None,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
        spec_verify_ct=[row.spec[0] for row in rows if row.spec],
        spec_num_correct_drafts=[row.spec[1] for row in rows if row.spec],
        **_only_newer(output_token_sampling_mask=None, output_token_sampling_logprobs=None),
    )


def _only_newer(**columns: Any) -> dict[str, Any]:
    known = io_struct.BatchTokenIDOutput.__struct_fields__
    return {name: value for name, value in columns.items() if name in known}


def embeddings(*rows: tuple[str, Any]) -> Any:
    count = len(rows)
    return io_struct.BatchEmbeddingOutput(
        rids=[rid for rid, _ in rows],
        http_worker_ipcs=[None] * count,
        finished_reasons=[{"type": "stop", "matched": None}] * count,
        embeddings=[value for _, value in rows],
        prompt_tokens=[3] * count,
        cached_tokens=[0] * count,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
    )


def stop(matched: Any = None) -> dict[str, Any]:
    return {"type": "stop", "matched": matched}


def abort(message: str = "Aborted", status: int | None = None, err: str | None = None) -> Any:
    return {"type": "abort", "message": message, "status_code": status, "err_type": err}


def ports() -> Any:
    """As SGLang's `PortArgs` names them."""
    folder = tempfile.mkdtemp(prefix="sglang-stub-")
    names = ("tokenizer_ipc_name", "scheduler_input_ipc_name", "detokenizer_ipc_name")
    return SimpleNamespace(**{name: f"ipc://{folder}/{name}" for name in names})


class StubScheduler:
    """See the module. `received` is everything but aborts, `aborts` their ids."""

    def __init__(self, port_args: Any, *, skip_tokenizer_init: bool = False) -> None:
        self._context = zmq.Context()
        self._folder = Path(port_args.tokenizer_ipc_name.removeprefix("ipc://")).parent
        self._pull = get_zmq_socket(
            self._context, zmq.PULL, port_args.scheduler_input_ipc_name, False
        )
        self.tokenizer = get_zmq_socket(
            self._context, zmq.PUSH, port_args.tokenizer_ipc_name, False
        )
        self.detokenizer = (
            self.tokenizer
            if skip_tokenizer_init
            else get_zmq_socket(self._context, zmq.PUSH, port_args.detokenizer_ipc_name, False)
        )
        self.received: list[Any] = []
        self.reached = False
        """Something came, if only an abort of `NOBODY`."""
        self.aborts: list[str] = []
        self.running: dict[str, _Running] = {}
        """What `serve` works on."""
        self.answers: dict[type, Any] = {}
        """Control request type to a function that makes its reply."""
        self._serving = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pull.getsockopt(zmq.FD), self._read)
        self._loop.call_soon(self._read)  # the descriptor tells edges only
        self._ticker: asyncio.Task[None] | None = None

    def _read(self) -> None:
        while not self._pull.closed:
            try:
                self._received(io_struct.sock_recv(self._pull, zmq.NOBLOCK))
            except zmq.Again:
                return

    def _received(self, message: Any) -> None:
        if isinstance(message, io_struct.AbortReq):
            if message.rid == NOBODY:
                self.reached = True
                return
            self.aborts.append(message.rid)
            for rid in [rid for rid in self.running if rid.startswith(message.rid)]:
                gone = self.running.pop(rid)
                end = batch(Row(rid, finish=abort(), completion_tokens=gone.made))
                io_struct.sock_send(self.detokenizer, end)
            return
        self.received.append(message)
        if self._serving and isinstance(message, io_struct.TokenizedGenerateReqInput):
            self.running[message.rid] = _Running(message)
        make = self.answers.get(type(message))
        if make is not None:
            self._reply(message, make(message))

    async def say(self, message: Any) -> None:
        """On the detokenizer's socket, where outputs go."""
        io_struct.sock_send(self.detokenizer, message)

    async def say_aside(self, message: Any) -> None:
        """On the tokenizer's socket, where all else goes."""
        io_struct.sock_send(self.tokenizer, message)

    async def reply(self, request: Any, message: Any) -> None:
        self._reply(request, message)

    def _reply(self, request: Any, message: Any) -> None:
        """As SGLang's sender does: the reply takes its request's return address."""
        message.http_worker_ipc = request.http_worker_ipc
        io_struct.sock_send(self.tokenizer, message)

    def serve(self, tick: float = 0.0005) -> None:
        """Generate from here on."""
        self._serving = True
        self._ticker = asyncio.ensure_future(self._tick(tick))

    async def _tick(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self.running:
                await self.say(batch(*self._step()))

    def _step(self) -> Iterator[Row]:
        for rid, one in list(self.running.items()):
            one.made += 1
            last = one.made >= one.most
            if last:
                del self.running[rid]
            yield Row(
                rid,
                [one.made] if one.most else [],
                {"type": "length", "length": one.made} if last else None,
                completion_tokens=one.made,
            )

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if not self._pull.closed:
            self._loop.remove_reader(self._pull.getsockopt(zmq.FD))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Running:
    def __init__(self, request: Any) -> None:
        self.request = request
        self.made = 0
        most = request.sampling_params.max_new_tokens
        self.most = 16 if most is None else most
