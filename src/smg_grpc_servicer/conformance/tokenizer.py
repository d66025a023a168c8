"""GetTokenizer: an archive that the gateway takes, whole, and the same each time.

Limits are the gateway's: 200 MiB zipped, 500 MiB unpacked, 50 entries, chunks under 4 MiB.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from dataclasses import dataclass
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.conformance.registry import Failed, NotApplicable, check, expect
from smg_grpc_servicer.conformance.target import Target, answered
from smg_grpc_servicer.testing.history import MAX_RECEIVE_BYTES

ENTRIES = 50
ZIPPED_BYTES = 200 * 2**20
UNPACKED_BYTES = 500 * 2**20
MODELS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
ENDINGS = (".tiktoken", ".model", ".spm")


@dataclass(frozen=True, slots=True)
class Archive:
    chunks: list[Any]

    @property
    def data(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)

    def open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(io.BytesIO(self.data))
        except zipfile.BadZipFile as error:
            raise Failed(f"{len(self.data)} bytes that are no zip: {error}") from None


async def _fetch(target: Target) -> Archive:
    """:raises NotApplicable: the server has none, and says why."""
    call = target.stub.GetTokenizer(
        common_pb2.GetTokenizerRequest(),
        timeout=target.timeout,
        metadata=target.connection.metadata,
    )
    try:
        return Archive([chunk async for chunk in call])
    except grpc.aio.AioRpcError as error:
        lacking = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
        if error.code() not in lacking:
            raise
        expect(error.details(), f"{error.code().name} without a reason")
        raise NotApplicable(f"{error.code().name}: {error.details()}") from None


@check("tokenizer-zip", "GetTokenizer is a zip with a tokenizer that can be loaded, intact")
async def tokenizer_zip(target: Target) -> str:
    archive = await _fetch(target)
    with archive.open() as unzipped:
        broken = unzipped.testzip()
        expect(broken is None, f"{broken} is damaged")
        names = unzipped.namelist()
    found = [name for name in names if name in MODELS or name.endswith(ENDINGS)]
    expect(found, f"no tokenizer among {names}")
    return f"{len(names)} files, {len(archive.data)} bytes"


@check("tokenizer-names", "its entries are plain top-level names, each once, fewer than 50")
async def tokenizer_names(target: Target) -> None:
    with (await _fetch(target)).open() as unzipped:
        names = unzipped.namelist()
        unpacked = sum(entry.file_size for entry in unzipped.infolist())
    expect(len(names) < ENTRIES, f"{len(names)} entries")
    expect(len(set(names)) == len(names), "a name comes twice")
    for name in names:
        plain = name not in ("", ".", "..") and not set(name) & set("/\\:")
        expect(plain, f"entry {name!r} is no top-level file")
    expect(unpacked <= UNPACKED_BYTES, f"{unpacked} bytes unpacked")


@check("tokenizer-sha256", "the SHA-256 of all bytes stands on the last chunk and only there")
async def tokenizer_sha256(target: Target) -> None:
    archive = await _fetch(target)
    expect(archive.chunks, "no chunk")
    early = sum(bool(chunk.sha256) for chunk in archive.chunks[:-1])
    expect(not early, f"a hash on {early} chunks before the last")
    wanted = hashlib.sha256(archive.data).hexdigest()
    said = archive.chunks[-1].sha256
    expect(said.lower() == wanted, f"the last chunk says {said!r}, the bytes {wanted}")


@check("tokenizer-same", "every call gets the same bytes, also at the same time")
async def tokenizer_same(target: Target) -> None:
    first = await _fetch(target)
    for other in await asyncio.gather(*(_fetch(target) for _ in range(3))):
        expect(other.data == first.data, f"{len(other.data)} bytes, {len(first.data)} before")


@check("tokenizer-size", "each chunk is under 4 MiB, the whole under 200 MiB")
async def tokenizer_size(target: Target) -> None:
    archive = await _fetch(target)
    largest = max(chunk.ByteSize() for chunk in archive.chunks)
    expect(largest < MAX_RECEIVE_BYTES, f"a chunk of {largest} bytes")
    expect(len(archive.data) <= ZIPPED_BYTES, f"{len(archive.data)} bytes")


@check("tokenizer-beside-streams", "fetching it leaves running streams whole")
async def tokenizer_beside_streams(target: Target) -> None:
    stream = target.send(target.request(max_tokens=target.tokens_for(1.0, 64)))
    expect(await stream.first(), "no first message")
    await _fetch(target)
    answered(await stream.end())
