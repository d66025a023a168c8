"""Media of models that count patches in a grid (Qwen's and those made like them).

Their encoder, their positions and their prompt all follow from the grid, and the scheduler ends
over one that fits none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.payloads import Media, Tensor
from smg_grpc_servicer.sglang.media import check_count

_TENSORS = "mm_inputs.model_specific_tensors"
_PLACES = "mm_inputs.mm_placeholders"
_GRID = "_grid_thw"
_CODES = {"int64": "q", "int32": "i", "uint32": "I"}


@dataclass(frozen=True, slots=True)
class GridRule:
    """What a model's configuration says of its patches."""

    merge: int
    """Patches of a token's side."""
    row: int | None
    """Numbers of one patch."""
    tokens: tuple[tuple[str, int], ...]
    """The token of each kind of media."""

    @classmethod
    def of(cls, model_config: Any) -> GridRule | None:
        """None for a model without such a grid."""
        if not (model_config.is_multimodal and model_config.model_is_mrope):
            return None
        hf = model_config.hf_config
        # A transformers configuration has what its model has, and nothing else.
        known = hf.vision_config.to_dict() if hasattr(hf, "vision_config") else {}
        if not {"spatial_merge_size", "patch_size", "temporal_patch_size"} <= known.keys():
            return None
        channels = known.get("in_channels") or known.get("in_chans")
        patch = known["temporal_patch_size"] * known["patch_size"] ** 2
        tokens = ((kind, getattr(hf, f"{kind}_token_id", None)) for kind in ("image", "video"))
        return cls(
            known["spatial_merge_size"],
            channels * patch if channels else None,
            tuple((kind, token) for kind, token in tokens if token is not None),
        )

    def check(self, media: Media, prompt: Sequence[int], most: Mapping[str, int]) -> None:
        """:param most: of a request, by kind of media.

        :raises InvalidArgument: naming the field.
        """
        grid = self._grid(media)
        check_count(_PLACES, media.modality, len(grid), most)
        shape = media.pixels.shape
        patches = sum(prod(row) for row in grid)
        if len(shape) != 2 or shape[0] != patches or self.row not in (None, shape[1]):
            raise InvalidArgument(
                "mm_inputs.pixel_values",
                f"must be {patches} rows of {self.row or 'one patch'}, as the grid says, "
                f"got {list(shape)}",
            )
        wanted, told = patches // self.merge**2, sum(length for _, length in media.placeholders)
        if wanted != told:
            raise InvalidArgument(
                _PLACES, f"must hold {wanted} tokens in all, as the grid says, got {told}"
            )
        token = dict(self.tokens).get(media.modality)
        for offset, length in media.placeholders:
            if token is not None and set(prompt[offset : offset + length]) != {token}:
                raise InvalidArgument(
                    _PLACES,
                    f"the place at {offset} must hold the token {token} of the {media.modality} "
                    "alone",
                )
        if token is not None and list(prompt).count(token) != told:
            raise InvalidArgument(
                _PLACES, f"the prompt has the token {token} outside of the places too"
            )

    def _grid(self, media: Media) -> list[tuple[int, int, int]]:
        name = f"{media.modality}{_GRID}"
        field, sent = f"{_TENSORS}[{name!r}]", media.tensors.get(name)
        if sent is None:
            raise InvalidArgument(field, "is required by this model")
        others = [other for other in media.tensors if other.endswith(_GRID) and other != name]
        if others:
            # Some processors read it whatever the media are of.
            raise InvalidArgument(_TENSORS, f"{others[0]!r} beside media of {media.modality}")
        grid = _rows(field, sent)
        for row in grid:
            if row[1] % self.merge or row[2] % self.merge:
                raise InvalidArgument(
                    field, f"must have sides that are multiples of {self.merge}, got {list(row)}"
                )
        return grid


def check_sizes(media: Media) -> None:
    """Of a model without a rule: what positions are made of cannot be larger than the media."""
    for name, sent in media.tensors.items():
        if name.endswith(_GRID):
            field = f"{_TENSORS}[{name!r}]"
            patches = sum(prod(row) for row in _rows(field, sent))
            if patches > len(media.pixels.data):
                raise InvalidArgument(
                    field, f"{patches} patches of {len(media.pixels.data)} bytes of media"
                )


def _rows(field: str, sent: Tensor) -> list[tuple[int, int, int]]:
    """:raises InvalidArgument: not rows of three positive numbers."""
    code = _CODES.get(sent.dtype)
    if code is None or len(sent.shape) != 2 or sent.shape[1] != 3 or not sent.shape[0]:
        raise InvalidArgument(
            field, f"must be int64 in rows of three, got {sent.dtype} of {list(sent.shape)}"
        )
    cells = struct.unpack(f"<{prod(sent.shape)}{code}", sent.data)
    grid = list(zip(cells[::3], cells[1::3], cells[2::3], strict=True))
    for row in grid:
        if min(row) < 1:
            raise InvalidArgument(field, f"must be positive, got {list(row)}")
    return grid
