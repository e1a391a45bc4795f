"""Chat streams of two lengths, for Locust; the command is in README.md.

A row `POST` is the whole answer, a row `TTFT` the time to the first text, a row `TPOT` the time per output token after it, once per answer.
"""

from __future__ import annotations

import json
import os
from time import perf_counter
from typing import ClassVar

from locust import FastHttpUser, between, task

PASSAGE = "The dispatcher wrote down when each train left the station and when it came to the next one. "


class ChatUser(FastHttpUser):
    wait_time = between(0.2, 1.0)
    default_headers: ClassVar = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}

    def on_start(self) -> None:
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task(4)
    def short(self) -> None:
        self.chat("short", "What is the capital of France?", max_tokens=32)

    @task(1)
    def long(self) -> None:
        self.chat("long", PASSAGE * 10 + "What did the dispatcher write down?", max_tokens=128)

    def chat(self, name: str, prompt: str, max_tokens: int) -> None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = perf_counter()
        with self.client.post("/v1/chat/completions", name=name, json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text}")
                return
            first_s = last_s = 0.0
            usage, is_done = {}, False
            for line in iter(lambda: response.stream.readline(b"\n"), b""):
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    is_done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    response.failure(event["error"]["message"])
                    return
                if event["choices"]:
                    last_s = perf_counter()
                    if not first_s and event["choices"][0]["delta"].get("content"):
                        first_s = last_s
                usage = event.get("usage") or usage
            response.request_meta["response_time"] = (perf_counter() - sent_s) * 1000
            if not is_done:
                response.failure("the stream ended before [DONE]")
        if is_done and first_s:
            self.report("TTFT", name, first_s - sent_s)
            if usage["completion_tokens"] > 1:
                self.report("TPOT", name, (last_s - first_s) / (usage["completion_tokens"] - 1))

    def report(self, kind: str, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=seconds * 1000, response_length=0, exception=None, context={}
        )
