"""``/cache/pin`` and ``/cache/unpin``: prefixes that eviction leaves alone."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter

from bicl.errors import BiclError
from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.errors import from_engine
from bicl.frontends.http.routes.common import ERRORS, TAGS, Salt, Server
from bicl.frontends.http.schemas.ops import PinnedPrefix, PinRequest, Unpinned, UnpinRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/cache/pin", tags=TAGS, responses={422: ERRORS[422]})
async def pin(body: PinRequest, server: Server, salt: Salt) -> PinnedPrefix:
    """Keep the cached whole pages of `inputs`, on the device and in host memory, for a time or
    until `/cache/unpin` or `/cache/flush`. What is not cached is not computed: send it first."""
    encoding = await server.tokenizer.encode(body.inputs, body.add_special_tokens)
    call = partial(server.inference.engine.pin, encoding.ids, body.ttl_seconds, salt=salt)
    try:
        return PinnedPrefix(tokens=len(encoding.ids), pinned_tokens=await asyncio.to_thread(call))
    except BiclError as error:
        raise from_engine(error) from error


@router.post("/cache/unpin", tags=TAGS)
async def unpin(body: UnpinRequest, server: Server, salt: Salt) -> Unpinned:
    """Let eviction have the pages of `inputs` again."""
    encoding = await server.tokenizer.encode(body.inputs, body.add_special_tokens)
    call = partial(server.inference.engine.unpin, encoding.ids, salt=salt)
    return Unpinned(unpinned=await asyncio.to_thread(call))
