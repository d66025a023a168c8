"""What the server says about itself: model, server, loads, reflection; true, and no secrets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from smg_grpc_servicer.conformance.registry import Failed, NotApplicable, check, expect
from smg_grpc_servicer.conformance.target import Target

_SECRET_KEY = re.compile(
    r"api_?key|secret|passw(or)?d|passphrase|credential|authorization|private_?key|access_?key"
    r"|(access|auth|hf|session|refresh|bearer)_?token$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@\[\]]+@"
    r"|--(api-key|hf-token)[ =][^\s\[*]",
)
_PLACEHOLDERS = ("null", "none", "unknown", "n/a")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _leaves(member, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for at, member in enumerate(value):
            yield from _leaves(member, f"{path}[{at}]")
    else:
        yield path, value


def _facts(message: Any) -> list[tuple[str, Any]]:
    """Everything a message says, by path; JSON inside strings is opened."""
    found = []
    for path, value in _leaves(MessageToDict(message, preserving_proto_field_name=True)):
        found.append((path, value))
        if isinstance(value, str) and value[:1] in "{[":
            try:
                found += _leaves(json.loads(value), path)
            except ValueError:
                continue
    return found


def _no_secret(message: Any) -> None:
    for path, value in _facts(message):
        if not value or str(value).strip("*x[]<> ").lower() in ("", "redacted"):
            continue
        key = path.rpartition(".")[2]
        expect(not _SECRET_KEY.search(key), f"{path} looks like a credential")
        expect(not _SECRET_VALUE.search(str(value)), f"the value of {path} looks like a credential")


@check("model-info", "GetModelInfo names the model, its sizes, and that it generates")
async def model_info(target: Target) -> str:
    info = await target.management("GetModelInfo")
    fields = info.DESCRIPTOR.fields_by_name
    expect(info.served_model_name, "served_model_name is empty")
    expect(info.model_path, "model_path is empty")
    if "is_generation" in fields:
        expect(info.is_generation, "is_generation is false: the gateway takes it for embeddings")
    expect(info.max_context_length > 0, f"max_context_length {info.max_context_length}")
    expect(info.vocab_size > 0, f"vocab_size {info.vocab_size}")
    for token in info.eos_token_ids:
        expect(0 <= token < info.vocab_size, f"EOS {token} in a vocabulary of {info.vocab_size}")
    return f"{info.served_model_name}, {info.vocab_size} ids, context {info.max_context_length}"


@check("model-info-honest", "unknown facts are empty, never a placeholder")
async def model_info_honest(target: Target) -> None:
    for name in ("GetModelInfo", "GetServerInfo"):
        for path, value in _facts(await target.management(name)):
            said = isinstance(value, str) and value.lower() in _PLACEHOLDERS
            # Structs hold the engine's own arguments, where "none" may be a choice.
            expect(not said or "." in path, f"{name}: {path} is {value!r}")


@check("model-info-defaults", "default_sampling_params_json is empty or a JSON object of numbers")
async def model_info_defaults(target: Target) -> str:
    info = await target.management("GetModelInfo")
    if "default_sampling_params_json" not in info.DESCRIPTOR.fields_by_name:
        raise NotApplicable("the proto has no such field")
    text = info.default_sampling_params_json
    if not text:
        return "empty"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Failed(f"{text!r}: {error}") from None
    expect(isinstance(values, dict), f"{text!r} is no object")
    return str(text)


@check("no-secrets", "no credential leaves in GetModelInfo or GetServerInfo")
async def no_secrets(target: Target) -> None:
    _no_secret(await target.management("GetModelInfo"))
    _no_secret(await target.management("GetServerInfo"))


@check("server-info", "GetServerInfo counts the requests in flight and its uptime")
async def server_info(target: Target) -> str:
    before = await target.management("GetServerInfo")
    stream = target.send(target.request(max_tokens=target.long))
    expect(await stream.first(), "no first message")
    during = await target.management("GetServerInfo")
    if not stream.ended:
        expect(during.active_requests > 0, "active_requests 0 while a stream runs")
    expect(during.uptime_seconds > 0, f"uptime_seconds {during.uptime_seconds}")
    expect(during.uptime_seconds >= before.uptime_seconds, "uptime_seconds fell")
    return f"up {during.uptime_seconds:.0f} s"


@check("loads", "GetLoads has an entry a rank, with numbers that can be")
async def loads(target: Target) -> str:
    if "GetLoadsRequest" not in target.dialect.pb.DESCRIPTOR.message_types_by_name:
        raise NotApplicable("the proto has no GetLoads")
    try:
        answer = await target.management("GetLoads")
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotApplicable(f"UNIMPLEMENTED: {error.details()}") from None
        raise
    expect(answer.loads, "no entry")
    for load in answer.loads:
        where = f"rank {load.dp_rank}"
        for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
            expect(getattr(load, name) >= 0, f"{where}: {name} {getattr(load, name)}")
        usage = load.token_usage
        expect(math.isfinite(usage) and 0 <= usage <= 1, f"{where}: token_usage {usage}")
    return f"{len(answer.loads)} ranks"


LOST = "Internal error from Core"
"""What grpc.aio makes of a status that came before it had sent the request."""


@check("reflection", "server reflection lists the service and health")
async def reflection(target: Target) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(target.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = None
    while answers is None:
        call = stub.ServerReflectionInfo(
            iter([request]), timeout=target.timeout, metadata=target.connection.metadata
        )
        try:
            answers = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotApplicable("reflection is off") from None
            if error.details() != LOST:
                raise
    listed = {
        service.name for answer in answers for service in answer.list_services_response.service
    }
    for name in (target.dialect.service, "grpc.health.v1.Health"):
        expect(name in listed, f"{name} is not among {sorted(listed)}")
