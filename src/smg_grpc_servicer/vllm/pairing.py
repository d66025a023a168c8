"""What the gateway pairs prefill and decode by, and where a constraint starts.

A `MultiConnector` is told as the one child that moves KV from worker to worker, else as its one
KV store, because the gateway knows connectors by name and not their nesting. What is ambiguous
goes out as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.types import PairingFacts
from smg_grpc_servicer.vllm.facts import dtype
from smg_grpc_servicer.vllm.probe import probe, text

PAIRING_PROTOCOL = "SMG_PAIRING_PROTOCOL"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is named, nothing is written

_ENCODER_DTYPES = ("float32", "float16", "bfloat16")
_PEER = ("Mooncake", "Nixl", "MoRIIO")
_STORE = ("MooncakeStore", "SharedStorage", "FlexKV", "HF3FS")
"""Prefixes of connector names. A Mooncake store begins like a Mooncake peer and is none."""

Child = Mapping[str, Any]


def pairing_facts(vllm_config: Any, environ: Mapping[str, str] = os.environ) -> PairingFacts:
    connector, role, engine_id = kv_identity(probe(vllm_config, "kv_transfer_config"))
    model = vllm_config.model_config
    parser, start = constraint_start(vllm_config)
    return PairingFacts(
        kv_connector=connector,
        kv_role=role,
        kv_engine_id=engine_id,
        kv_cache_dtype=text(vllm_config, "cache_config.cache_dtype"),
        attention_backend=_name(probe(vllm_config, "attention_config.backend")),
        model_dtype=dtype(model),
        pairing_protocol=environ.get(PAIRING_PROTOCOL, "").strip() or None,
        encoder_dtype=_encoder_dtype(model),
        shm_namespace_id=shm_namespace(),
        reasoning_parser=parser,
        constraint_start=start,
    )


def kv_identity(config: object) -> tuple[str | None, str | None, str | None]:
    """Connector, role and engine id of a `KVTransferConfig`; all None without one."""
    if config is None:
        return None, None, None
    name, role = text(config, "kv_connector"), text(config, "kv_role")
    engine_id = text(config, "engine_id")
    child = _one_child(probe(config, "kv_connector_extra_config")) if _is_multi(name) else None
    if child is None:
        return name, role, engine_id
    return (
        child["kv_connector"],
        _text(child.get("kv_role")) or role,
        _text(child.get("engine_id")) or engine_id,
    )


def constraint_start(vllm_config: Any) -> tuple[str | None, str | None]:
    """The reasoning parser, and from where a constraint holds on a prompt inside a thought."""
    config = probe(vllm_config, "structured_outputs_config")
    inside = probe(config, "enable_in_reasoning")
    parser = text(config, "reasoning_parser")
    if not isinstance(inside, bool):
        return parser, None
    return parser, "after_reasoning" if parser and not inside else "first_token"


def shm_namespace() -> str | None:
    """`<boot id>:<device>` of /dev/shm: who has the same can hand tensors over in it."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot}:{_SHARED_MEMORY.stat().st_dev}" if boot else None
    except OSError:
        return None


def _is_multi(name: str | None) -> bool:
    return name == "MultiConnector"


def _one_child(extra: object) -> Child | None:
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(listed, Sequence) or not all(map(_well_formed, listed)):
        return None
    children: list[Child] = list(listed)
    peers = [c for c in children if _starts(c, _PEER) and not _starts(c, _STORE)]
    stores = [c for c in children if _starts(c, _STORE)]
    if len(peers) == 1:
        # MoRIIO moves KV only beside a store that has it; the store is what others pair with.
        return stores[0] if _starts(peers[0], ("MoRIIO",)) and len(stores) == 1 else peers[0]
    return stores[0] if not peers and len(stores) == 1 else None


def _well_formed(child: object) -> bool:
    return isinstance(child, Mapping) and bool(_text(child.get("kv_connector")))


def _starts(child: Child, prefixes: tuple[str, ...]) -> bool:
    return str(child["kv_connector"]).startswith(prefixes)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _name(backend: object) -> str | None:
    """An enum's member name, or a plain text."""
    if backend is None:
        return None
    return backend if isinstance(backend, str) else str(getattr(backend, "name", backend))


def _encoder_dtype(model: Any) -> str | None:
    name = (dtype(model) or "").removeprefix("torch.")
    return name if name in _ENCODER_DTYPES else None
