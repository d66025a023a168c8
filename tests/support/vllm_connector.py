"""A KV connector that runs on a CPU: vLLM's own example, and the manners of a real one.

vLLM's `ExampleConnector` writes the KV of every prompt to a folder and takes it from there without
being asked. This one takes it only for a request that says `do_remote_prefill`, gives parameters
back to one that says `do_remote_decode`, and writes down what it was told of each request's end.
It is loaded by `kv_connector_module_path`, in the engine's process and in the worker's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

TOLD = "told.jsonl"


class NixlConnector(ExampleConnector):  # type: ignore[misc]
    """Named like the one whose parameters these are: the gateway knows connectors by name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loaded: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._loaded[request.request_id] = num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        told = {
            "id": request.request_id,
            "params": params,
            "loaded": self._loaded.pop(request.request_id, None),
            "status": request.status.name,
        }
        with (Path(self._storage_path) / TOLD).open("a") as file:
            file.write(json.dumps(told) + "\n")
        if not (params or {}).get("do_remote_decode"):
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_ids],
            "remote_host": "10.0.0.7",
            "remote_port": 5557,
            "echo": params,
        }
