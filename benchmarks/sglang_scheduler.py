"""A scheduler that costs nothing, in a process of its own: `sglang_scheduler.py PORTS_JSON`.

It speaks over SGLang's sockets with SGLang's own message classes, filled as SGLang's scheduler
fills them, and gives every running request one token each step. On standard input it takes the
seconds between two steps.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.utils.network import get_zmq_socket


class Scheduler:
    """One loop: take requests and aborts, then a step."""

    def __init__(self, port_args: Any) -> None:
        context = zmq.Context()
        self.inbound = get_zmq_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
        self.outbound = get_zmq_socket(context, zmq.PUSH, port_args.detokenizer_ipc_name, False)
        self.aside = get_zmq_socket(context, zmq.PUSH, port_args.tokenizer_ipc_name, False)
        self.seconds = 0.001
        self.running: dict[str, tuple[Any, int]] = {}

    def loop(self) -> None:
        due = perf_counter()
        while True:
            self._take()
            if self.running:
                io_struct.sock_send(self.outbound, self._step())
            due = max(due + self.seconds, perf_counter() - self.seconds)
            sleep(max(due - perf_counter(), 0.0001))

    def _take(self) -> None:
        while True:
            try:
                message = io_struct.sock_recv(self.inbound, zmq.NOBLOCK)
            except zmq.Again:
                return
            if isinstance(message, io_struct.AbortReq):
                self.running.pop(message.rid, None)
            elif message.rid.startswith("HEALTH_CHECK"):
                io_struct.sock_send(self.aside, io_struct.HealthCheckOutput())
            else:
                self.running[message.rid] = (message, 0)

    def _step(self) -> Any:
        rows = list(self.running.items())
        reasons, top = [], 0
        for rid, (request, made) in rows:
            last = made + 1 >= request.sampling_params.max_new_tokens
            reasons.append({"type": "length", "length": made + 1} if last else None)
            top = max(top, request.top_logprobs_num if request.return_logprob else 0)
            if last:
                del self.running[rid]
            else:
                self.running[rid] = (request, made + 1)
        return batch([rid for rid, _ in rows], [made + 1 for _, (_, made) in rows], reasons, top)


def batch(rids: list[str], made: list[int], reasons: list[Any], top: int) -> Any:
    count = len(rids)
    ids = [array("q", [3 + at % 900]) for at in made]
    columns: dict[str, Any] = {}
    for kind in ("token", "top", "token_ids"):
        for part in ("val", "idx"):
            columns[f"input_{kind}_logprobs_{part}"] = [[] for _ in rids] if top else None
            columns[f"output_{kind}_logprobs_{part}"] = [[] for _ in rids] if top else None
    if top:
        columns["output_token_logprobs_val"] = [[-0.5] for _ in rids]
        columns["output_token_logprobs_idx"] = [list(one) for one in ids]
        columns["output_top_logprobs_val"] = [[[-0.5 - i for i in range(top)]] for _ in rids]
        columns["output_top_logprobs_idx"] = [[[7 + i for i in range(top)]] for _ in rids]
    return io_struct.BatchTokenIDOutput(
        rids=rids,
        http_worker_ipcs=[None] * count,
        finished_reasons=reasons,
        decoded_texts=[""] * count,
        decode_ids=ids,
        read_offsets=[0] * count,
        output_ids=ids,
        skip_special_tokens=[True] * count,
        spaces_between_special_tokens=[True] * count,
        no_stop_trim=[False] * count,
        prompt_tokens=[3] * count,
        reasoning_tokens=[0] * count,
        completion_tokens=made,
        cached_tokens=[0] * count,
        output_token_entropy_val=None,
        output_token_sampling_mask=None,
        output_hidden_states=None,
        routed_experts=None,
        indexer_topk=None,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
        retraction_counts=[0] * count,
        cached_tokens_details=[None] * count,
        dp_ranks=[None] * count,
        time_stats=io_struct.wrap_as_pickle([SchedulerReqTimeStats() for _ in rids]),
        image_tokens=[0] * count,
        audio_tokens=[0] * count,
        video_tokens=[0] * count,
        spec_verify_ct=[],
        spec_num_correct_drafts=[],
        **columns,
    )


def main() -> None:
    scheduler = Scheduler(SimpleNamespace(**json.loads(sys.argv[1])))
    threading.Thread(target=scheduler.loop, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        scheduler.seconds = float(line)


if __name__ == "__main__":
    main()
