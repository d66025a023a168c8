"""What a servicer needs of a running SGLang beside its ranks, read from SGLang's own records.

Made after `publish`, on a thread: a tokenizer and a model's configuration take seconds to read,
and the ranks load meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.sglang import facts, media_processor, releases
from smg_grpc_servicer.sglang.adapter import SglangEngine
from smg_grpc_servicer.sglang.encoders import Encoders
from smg_grpc_servicer.sglang.limits import Limits
from smg_grpc_servicer.sglang.loads import LoadReader
from smg_grpc_servicer.sglang.request_manager import RequestManager
from smg_grpc_servicer.sglang.sockets import Sockets

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """See the module."""

    server_args: Any
    config: Any
    """Its resolved view."""
    model_config: Any
    tokenizer: Any
    processor: Any
    """Of media; None for a text model."""
    encoders: Encoders | None
    reader: LoadReader | None

    @classmethod
    def of(cls, server_args: Any, port_args: Any = None) -> Parts:
        """:param port_args: of ranks whose load reports are to be read; None reads none."""
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.configs.model_config import ModelConfig

        config = resolving_view(server_args)
        model_config = ModelConfig.from_server_args(server_args)
        processor = media_processor.load(server_args, config, model_config)
        return cls(
            server_args,
            config,
            model_config,
            _tokenizer(config),
            processor,
            Encoders.of(server_args, config, model_config, processor),
            None if port_args is None else LoadReader.of(port_args),
        )

    def engine(
        self,
        manager: RequestManager,
        ready: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
    ) -> SglangEngine:
        """The core's engine over ranks that are ready.

        :param given: the launcher's own model facts, if it has any.
        """
        reader = self.reader
        return SglangEngine(
            manager,
            model_facts=facts.model_facts(self.config, self.model_config, ready, given),
            server_facts=facts.server_facts(
                self.server_args,
                self.config,
                ready,
                lambda: {} if reader is None else reader.bounds,
                releases.installed(),
            ),
            loads=_no_loads if reader is None else reader.read,
            limits=Limits.of(self.config, self.model_config, ready),
            tokenizer=self.tokenizer,
            processor=self.processor,
            encoders=self.encoders,
            revision=self.config.revision,
        )


@dataclass(slots=True)
class Front:
    """What stands where SGLang's tokenizer manager would: bound sockets, and `Parts`."""

    sockets: Sockets
    parts: Parts
    bootstrap: Any
    """The KV bootstrap server of a prefill, which runs while this is kept."""

    async def close(self) -> None:
        """Of ranks that nobody waits for any more."""
        await self.sockets.close()
        if self.parts.reader is not None:
            await asyncio.to_thread(self.parts.reader.close)

    @classmethod
    def of(cls, server_args: Any, port_args: Any) -> Front:
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.managers.disagg_service import start_disagg_service

        # Ranks are on their way and connect whenever this is there.
        sockets = Sockets.bind(port_args, resolving_view(server_args).skip_tokenizer_init)
        bootstrap = start_disagg_service()
        return cls(sockets, Parts.of(server_args, port_args), bootstrap)


async def _no_loads() -> Sequence[Load]:
    return ()


def _tokenizer(config: Any) -> Any:
    """As SGLang's own tokenizer manager reads it; None when there is to be none."""
    if config.skip_tokenizer_init:
        return None
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    read: Callable[..., Any] = get_tokenizer
    return read(
        config.tokenizer_path or config.model_path,
        tokenizer_mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        tokenizer_backend=config.tokenizer_backend,
    )
