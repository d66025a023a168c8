"""The heavier parts of the vocabulary: tensors, media, hidden states, adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tensor:
    """Raw little-endian bytes; `dtype` by torch's and numpy's name, for example `float32`."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Media:
    """Preprocessed media of one request: the main tensor and what its model needs beside it."""

    pixels: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    placeholders: tuple[tuple[int, int], ...] = ()
    """(offset, length) of each item's tokens in the prompt."""
    token_id: int | None = None
    """The token those places hold."""
    modality: str = "image"


@dataclass(frozen=True, slots=True)
class MediaReferences:
    """Where the media of one request lie; by kind, in the prompt's order."""

    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The last layer's rows at consecutive positions."""

    first_position: int
    """Of the first row, counted from the prompt's start; -1: one row, of the last position."""
    rows: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; its id is what requests name."""

    id: str
    name: str
    path: str
    pinned: bool = False
