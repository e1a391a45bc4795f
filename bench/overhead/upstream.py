"""Answers every chat completion after a fixed time, as an OpenAI-compatible server: the fake upstream of `bench.gateway_overhead`.

    python -m bench.overhead.upstream --pause-ms 20     prints its port

The pause is measured from the last byte of the request's body. While few requests pause, it ends with a busy wait: timers add nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import uvloop
from aiohttp import web

SPIN_S = 0.001
"""Seconds before its end at which a pause stops sleeping and yields instead: timers of the event loop come up to a millisecond late."""

MAX_SPINNING = 4
"""Requests that pause at once beyond which none spins: ten of them would keep half a core from the gateway, which shares them."""

WORDS = " ".join(["steady"] * 16)


def application(pause_s: float) -> web.Application:
    answer = json.dumps(
        {
            "id": "chatcmpl-paced",
            "object": "chat.completion",
            "created": 1,
            "model": "paced",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": WORDS}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 16, "total_tokens": 28},
        }
    ).encode()

    pausing: set[object] = set()

    async def pause() -> None:
        until, one = time.perf_counter() + pause_s, object()
        pausing.add(one)
        spin_s = SPIN_S if len(pausing) <= MAX_SPINNING else 0.0
        try:
            await asyncio.sleep(max(0.0, pause_s - spin_s))
            while spin_s and time.perf_counter() < until:
                await asyncio.sleep(0)
        finally:
            pausing.discard(one)

    async def chat(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        await pause()
        if not body.get("stream"):
            return web.Response(body=answer, content_type="application/json")
        return await _streamed(request)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "paced", "object": "model", "max_model_len": 4096}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    return app


async def _streamed(request: web.Request) -> web.StreamResponse:
    """The same answer as events: our gateway asks foreign servers for streams whatever its client wants."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    head = {"id": "chatcmpl-paced", "object": "chat.completion.chunk", "created": 1, "model": "paced"}
    usage = {"prompt_tokens": 12, "completion_tokens": 16, "total_tokens": 28}
    parts = [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": WORDS}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {**head, "choices": [], "usage": usage},
    ]
    lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
    await response.write("".join([*lines, "data: [DONE]\n\n"]).encode())
    await response.write_eof()
    return response


async def serve(pause_s: float) -> None:
    runner = web.AppRunner(application(pause_s), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    uvloop.run(serve(parser.parse_args().pause_ms / 1000))


if __name__ == "__main__":
    main()
