"""How media of a request are processed on the worker: `--mm-*`, `SMG_VLLM_MM_*`.

All of them are checked whatever the processor. Sizes are bytes, times milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.settings import Setting, Settings, Values

OFF = "off"
SMG = "smg"
"""The Rust server's own pipeline; the others are vLLM's, in this process or behind Redis."""

PROCESSOR = Setting(
    "mm_processor",
    parsers.one_of(OFF, "inprocess", "redis", SMG),
    OFF,
    "who fetches and processes media that a request only refers to; smg needs --servicer-impl "
    "rust, inprocess and redis are not served yet",
    "--mm-processor",
    "SMG_VLLM_MM_PROCESSOR",
)
MAX_INFLIGHT = Setting(
    "mm_max_inflight",
    parsers.POSITIVE_INT,
    64,
    "requests whose media are processed at a time",
    "--mm-max-inflight",
    "SMG_VLLM_MM_MAX_INFLIGHT",
)
MAX_ITEMS: Setting[int | None] = Setting(
    "mm_max_items",
    parsers.POSITIVE_INT,
    None,
    "media of one kind in a request; the model's own limits when not set",
    "--mm-max-items",
    "SMG_VLLM_MM_MAX_ITEMS",
)
MAX_ITEM_BYTES = Setting(
    "mm_max_item_bytes",
    parsers.BYTES,
    32 * 2**20,
    "largest inline item (data: URL)",
    "--mm-max-item-bytes",
    "SMG_VLLM_MM_MAX_ITEM_BYTES",
)
REDIS_URL = Setting(
    "mm_redis_url",
    parsers.TEXT,
    "redis://127.0.0.1:6379/0",
    "where the sidecar of --mm-processor redis is met (not served yet)",
    "--mm-redis-url",
    "SMG_VLLM_MM_REDIS_URL",
    secret=True,
)
SIDECAR_TIMEOUT = Setting(
    "mm_sidecar_timeout_ms",
    parsers.POSITIVE_INT,
    30_000,
    "how long the sidecar may take for one request (not served yet)",
    "--mm-sidecar-timeout-ms",
    "SMG_VLLM_MM_SIDECAR_TIMEOUT_MS",
)
SIDECAR_QUEUE = Setting(
    "mm_sidecar_max_queue",
    parsers.POSITIVE_INT,
    256,
    "requests that may wait for the sidecar; more are refused at once (not served yet)",
    "--mm-sidecar-max-queue",
    "SMG_VLLM_MM_SIDECAR_MAX_QUEUE",
)
SIDECAR_NAMESPACE: Setting[str | None] = Setting(
    "mm_sidecar_namespace",
    parsers.TEXT,
    None,
    "namespace shared with the sidecar; made from the model's settings when not set (not "
    "served yet)",
    "--mm-sidecar-namespace",
    "SMG_VLLM_MM_SIDECAR_NAMESPACE",
)
FETCH_TIMEOUT = Setting(
    "mm_fetch_timeout_ms",
    parsers.POSITIVE_INT,
    10_000,
    "how long one image or sound may take to fetch (processor smg)",
    "--mm-fetch-timeout-ms",
    "SMG_VLLM_MM_FETCH_TIMEOUT_MS",
)
VIDEO_FETCH_TIMEOUT = Setting(
    "mm_video_fetch_timeout_ms",
    parsers.POSITIVE_INT,
    30_000,
    "how long one video may take to fetch (processor smg)",
    "--mm-video-fetch-timeout-ms",
    "SMG_VLLM_MM_VIDEO_FETCH_TIMEOUT_MS",
)
TURBOJPEG = Setting(
    "mm_turbojpeg",
    parsers.one_of("prefer", "require"),
    "prefer",
    "whether JPEGs have to be decoded by libjpeg-turbo (processor smg)",
    "--mm-turbojpeg",
    "SMG_VLLM_MM_TURBOJPEG",
)
MAX_VIDEO_FRAMES = Setting(
    "mm_max_video_frames",
    parsers.COUNT,
    0,
    "frames a video is sampled to at most; 0 = the model's own number",
    env="SMG_VLLM_MM_MAX_VIDEO_FRAMES",
)

SETTINGS = Settings(
    PROCESSOR,
    MAX_INFLIGHT,
    MAX_ITEMS,
    MAX_ITEM_BYTES,
    REDIS_URL,
    SIDECAR_TIMEOUT,
    SIDECAR_QUEUE,
    SIDECAR_NAMESPACE,
    FETCH_TIMEOUT,
    VIDEO_FETCH_TIMEOUT,
    TURBOJPEG,
    MAX_VIDEO_FRAMES,
)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """The settings in force."""

    processor: str = OFF
    source: str = "default"
    """Who chose the processor: `flag`, `env` or `default`, as the gateway is told."""
    max_inflight: int = MAX_INFLIGHT.default
    max_items: int | None = None
    max_item_bytes: int = MAX_ITEM_BYTES.default
    fetch_timeout_ms: int = FETCH_TIMEOUT.default
    video_fetch_timeout_ms: int = VIDEO_FETCH_TIMEOUT.default
    turbojpeg: str = TURBOJPEG.default
    max_video_frames: int = 0

    @classmethod
    def from_values(cls, values: Values) -> MediaOptions:
        return cls(
            processor=values.get_value(PROCESSOR),
            source=values.sources[PROCESSOR.name].partition(" ")[0],
            max_inflight=values.get_value(MAX_INFLIGHT),
            max_items=values.get_value(MAX_ITEMS),
            max_item_bytes=values.get_value(MAX_ITEM_BYTES),
            fetch_timeout_ms=values.get_value(FETCH_TIMEOUT),
            video_fetch_timeout_ms=values.get_value(VIDEO_FETCH_TIMEOUT),
            turbojpeg=values.get_value(TURBOJPEG),
            max_video_frames=values.get_value(MAX_VIDEO_FRAMES),
        )

    def require_served(self, impl: str) -> None:
        """:raises ConfigError: the servicer `impl` has no such processor (yet)."""
        if self.processor == OFF or (self.processor == SMG and impl == "rust"):
            return
        reason = "needs --servicer-impl rust" if self.processor == SMG else "is not served yet"
        raise ConfigError(
            f"{PROCESSOR.flag}: got {self.processor!r}, which {reason}; allowed: "
            f"{OFF}, or {SMG} with --servicer-impl rust"
        )


def smg_pipeline(
    options: MediaOptions,
    *,
    model_dir: str,
    model_id: str,
    raw_pixels: bool,
    encoder_dtype: str,
    processor_kwargs_json: str | None,
    item_limits: Mapping[str, int],
    allowed_domains: Sequence[str] | None,
) -> dict[str, object]:
    """The settings of the Rust server's pipeline, as its `smg_media_processor` takes them.

    It ignores a key that it does not know.
    """
    return {
        "model_dir": model_dir,
        "model_id": model_id,
        "raw_pixels": raw_pixels,
        "encoder_dtype": encoder_dtype,
        "processor_kwargs_json": processor_kwargs_json,
        "max_inflight": options.max_inflight,
        "max_items": options.max_items,
        "engine_item_limits": dict(item_limits) or None,
        "allowed_domains": list(allowed_domains or ()) or None,
        "max_item_bytes": options.max_item_bytes,
        "fetch_timeout_ms": options.fetch_timeout_ms,
        "video_fetch_timeout_ms": options.video_fetch_timeout_ms,
        "video_frame_budget": options.max_video_frames or None,
        "turbojpeg": options.turbojpeg,
        "source": options.source,
    }
