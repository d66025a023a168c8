"""A warm-up through a core `Engine`, past its server.

Nothing of it is a client's: no place in the request table, no metrics, no record. A client cannot
be taken for it either, whatever id it sends: until the warm-up is over the server admits nobody.
"""

from __future__ import annotations

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import Internal
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.types import Feature, GenerateSpec, Sampling
from smg_grpc_servicer.warmup.plan import Plan, Request
from smg_grpc_servicer.warmup.run import FLUSH_SECONDS, Outcome, run


async def warm(engine: Engine, plan: Plan, seconds: float) -> Outcome:
    """Carry the plan out; `engine.warmed` is told whatever comes of it."""

    async def send(request: Request) -> None:
        await answered(
            engine,
            GenerateSpec(
                request.request_id,
                request.prompt,
                sampling=Sampling(
                    temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
                ),
                rank=request.rank,
            ),
        )

    flushes = Feature.FLUSH_CACHE in engine.features
    try:
        return await run(
            plan,
            send,
            seconds=seconds,
            flush=(lambda: engine.flush_cache(FLUSH_SECONDS)) if flushes else None,
        )
    finally:
        engine.warmed()


async def answered(engine: Engine, spec: GenerateSpec) -> None:
    """Until the engine has answered one request that is not streamed.

    :raises Exception: it was refused, or ended before its time.
    """
    mailbox = Mailbox(stream=False)
    try:
        await engine.submit(spec, mailbox)
        while await mailbox.wait():
            delta = mailbox.take()
            if delta is not None and delta.finish is not None and delta.finish.reason == "abort":
                raise Internal("the engine aborted the request")
    finally:
        if not mailbox.engine_done:
            engine.abort(spec.request_id)
        mailbox.close()
