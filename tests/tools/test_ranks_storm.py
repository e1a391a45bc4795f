"""Tests how the storm of ranks makes a member lie: it finds the link among the sockets of a process, and writes into it from outside."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from bench.storms.ranks import lie
from headrace.core.errors import EngineFatal
from headrace.engine.ranks.frames import FrameKind
from headrace.engine.ranks.link import RankLink

pytestmark = pytest.mark.socket


def test_the_lie_comes_over_the_link_to_rank_0_and_over_no_other_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as member:
        listening.bind(str(tmp_path / "e0.ranks"))
        listening.listen()
        other.bind(str(tmp_path / "e0.sock"))
        other.listen()
        with pytest.raises(OSError, match="no link"):
            lie(psutil.Process(os.getpid()))
        member.connect(str(tmp_path / "e0.ranks"))
        theirs, _ = listening.accept()
        link = RankLink(theirs, {FrameKind.BEAT: 0})
        lie(psutil.Process(os.getpid()))
        with pytest.raises(EngineFatal, match="kind 8 where only BEAT may come"):
            link.receive()
        link.close()
