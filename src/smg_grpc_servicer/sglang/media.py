"""Preprocessed media as SGLang's scheduler takes them: one item with its tensors and places.

Everything is checked before a byte is read: a tensor that is not what it says ends the request
here, not the scheduler. `build` copies (torch does not own a message's bytes): off the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.payloads import Media, MediaReferences, Tensor
from smg_grpc_servicer.sglang.media_processor import positions

WIDTHS = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "int64": 8,
    "int32": 4,
    "uint32": 4,
    "bool": 1,
}
MODALITIES = ("image", "video", "audio")
MOST_DIMENSIONS = 8
"""No model has more; the product of a million numbers would hold up the loop."""
SCHEMES = ("http://", "https://", "data:")
"""Of references. SGLang's encoders take any other text for a file of their machine."""
_WIDENED = {"uint32": "int64"}
"""SGLang's unpickler ends over torch's uint32, and next to no operator takes it."""


def check(media: Media, prompt_length: int) -> None:
    """:raises InvalidArgument: naming the field."""
    if media.modality not in MODALITIES:
        raise InvalidArgument(
            "mm_inputs.modalities", f"must be of {', '.join(MODALITIES)}, got {media.modality!r}"
        )
    _check("mm_inputs.pixel_values", media.pixels)
    for name, tensor in media.tensors.items():
        _check(f"mm_inputs.model_specific_tensors[{name!r}]", tensor)
    if not media.placeholders:
        raise InvalidArgument("mm_inputs.mm_placeholders", "is required: where the media stand")
    end = 0
    for offset, length in sorted(media.placeholders):
        if not length:
            raise InvalidArgument("mm_inputs.mm_placeholders", "a place must not be empty")
        if offset < end:
            raise InvalidArgument("mm_inputs.mm_placeholders", f"two places hold token {offset}")
        end = offset + length
        if end > prompt_length:
            raise InvalidArgument(
                "mm_inputs.mm_placeholders",
                f"the place {offset} to {end} is outside the prompt of {prompt_length} tokens",
            )


def check_references(references: MediaReferences, most: Mapping[str, int]) -> None:
    """:param most: of a request, by kind of media; a kind that is not named has no limit."""
    for kind in MODALITIES:
        field, urls = f"mm_inputs.{kind}_urls", getattr(references, f"{kind}s")
        check_count(field, kind, len(urls), most)
        for at, url in enumerate(urls):
            if not url.startswith(SCHEMES):
                # What it is instead stays here: a path, or a name and a password.
                raise InvalidArgument(f"{field}[{at}]", "must be an http, https or data URL")


def check_count(field: str, kind: str, count: int, most: Mapping[str, int]) -> None:
    limit = most.get(kind)
    if limit is not None and count > limit:
        raise InvalidArgument(
            field,
            f"{count} are more than --limit-mm-data-per-request allows of {kind}: {limit}",
        )


def _check(field: str, tensor: Tensor) -> None:
    width = WIDTHS.get(tensor.dtype)
    if width is None:
        raise InvalidArgument(
            f"{field}.dtype", f"must be of {', '.join(WIDTHS)}, got {tensor.dtype!r}"
        )
    if len(tensor.shape) > MOST_DIMENSIONS:
        raise InvalidArgument(
            f"{field}.shape",
            f"must have at most {MOST_DIMENSIONS} dimensions, got {len(tensor.shape)}",
        )
    expected = prod(tensor.shape) * width
    if len(tensor.data) != expected:
        raise InvalidArgument(
            field,
            f"{tensor.dtype} of shape {list(tensor.shape)} takes {expected} bytes, "
            f"got {len(tensor.data)}",
        )


def build(media: Media, prompt: Sequence[int], processor: Any) -> Any:
    """SGLang's `MultimodalProcessorOutput`.

    :param processor: of `media_processor`; None leaves positions to the scheduler.
    """
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    item = MultimodalDataItem(
        modality=Modality[media.modality.upper()],
        feature=_tensor(media.pixels),
        offsets=[(offset, offset + length - 1) for offset, length in media.placeholders],
        model_specific_data={name: _tensor(tensor) for name, tensor in media.tensors.items()},
    )
    where = {} if processor is None else positions(processor, prompt, [item])
    return MultimodalProcessorOutput(mm_items=[item], im_token_id=media.token_id, **where)


def _tensor(tensor: Tensor) -> Any:
    import torch

    dtype = getattr(torch, tensor.dtype)
    if tensor.data:
        made = torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
    else:
        made = torch.empty(tensor.shape, dtype=dtype)
    wider = _WIDENED.get(tensor.dtype)
    return made if wider is None else made.to(getattr(torch, wider))
