"""A server started for one command: it answers inside the block and is gone after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.child import started_server
from headrace.cli.client import ApiClient
from headrace.cli.exits import ServerFailed
from tests.house.stand_in import stand_in


def test_server_that_cannot_start_tells_its_last_words() -> None:
    with pytest.raises(ServerFailed, match=r"ended before it answered\n.*neither a folder with a config.json"), started_server("/absent"):
        pass


@pytest.mark.slow
def test_server_answers_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    made = stand_in(tmp_path)
    arguments = ["--max-model-len", "128"] if made is None else ["--max-model-len", "128", "--load-format", made[1]]
    with started_server(None if made is None else made[0], arguments) as url:
        client = ApiClient(url)
        assert client.models() == ["headrace-tiny"]
        text = list(client.chat({"model": "headrace-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}))
        assert text
    with pytest.raises(ServerFailed):
        client.models()
