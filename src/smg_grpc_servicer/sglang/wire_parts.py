"""Parts of SGLang's proto that no other has: media tensors, custom parameters, adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping

from google.protobuf.struct_pb2 import Struct, Value
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.payloads import Adapter, HiddenStates, Media, MediaReferences, Tensor
from smg_grpc_servicer.sglang.fields import RAW_MEDIA


def media(who: str, sent: pb.MultimodalInputs) -> Media | None:
    """An empty message asks for nothing.

    :raises Unsupported: media without the tensors made of it, which would be answered as text.
    """
    if not sent.HasField("pixel_values"):
        if sent.ListFields() and references(sent) is None:
            raise Unsupported(who, RAW_MEDIA)
        return None
    kinds = set(sent.modalities) or {"image"}
    if len(kinds) > 1:
        raise InvalidArgument(
            "mm_inputs.modalities", f"one kind of media per request, got {sorted(kinds)}"
        )
    return Media(
        pixels=_tensor(sent.pixel_values),
        tensors={name: _tensor(value) for name, value in sent.model_specific_tensors.items()},
        placeholders=tuple((place.offset, place.length) for place in sent.mm_placeholders),
        token_id=sent.im_token_id if sent.HasField("im_token_id") else None,
        modality=kinds.pop(),
    )


def references(sent: pb.MultimodalInputs) -> MediaReferences | None:
    """:raises InvalidArgument: the same media in two forms."""
    if not (sent.image_urls or sent.video_urls or sent.audio_urls):
        return None
    if sent.HasField("pixel_values") or sent.image_data or sent.video_data or sent.audio_data:
        raise InvalidArgument("mm_inputs", "has both media and references to media")
    return MediaReferences(tuple(sent.image_urls), tuple(sent.video_urls), tuple(sent.audio_urls))


def _tensor(sent: pb.TensorData) -> Tensor:
    return Tensor(sent.data, tuple(sent.shape), sent.dtype)


def custom_params(sent: Struct) -> Mapping[str, object]:
    """A Struct has no integers; what is whole was one, and SGLang's checks want one."""
    return {name: _plain(value) for name, value in sent.fields.items()}


def _plain(sent: Value) -> object:
    kind = sent.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind == "struct_value":
        return custom_params(sent.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in sent.list_value.values]
    if kind != "number_value":
        return sent.string_value if kind == "string_value" else sent.bool_value
    number = sent.number_value
    if not math.isfinite(number):
        raise InvalidArgument(
            "sampling_params.custom_params", f"must hold finite numbers, got {number}"
        )
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def adapter(request: pb.LoadLoRAAdapterRequest) -> Adapter:
    return Adapter(request.lora_id, request.lora_name, request.lora_path, request.pinned)


def fill_adapter(part: pb.LoadedLoRAAdapter, loaded: Adapter) -> None:
    part.lora_id = loaded.id
    part.lora_name = loaded.name
    part.lora_path = loaded.path
    part.pinned = loaded.pinned


def fill_hidden_states(complete: pb.GenerateComplete, hidden: HiddenStates, length: int) -> None:
    """Every row with its position; `length` is that of prompt and output."""
    first = hidden.first_position if hidden.first_position >= 0 else length - 1
    for at, row in enumerate(hidden.rows):
        part = complete.all_hidden_states.add()
        part.values.extend(row)
        part.position = first + at
