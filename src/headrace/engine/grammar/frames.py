"""Sends and receives frames between an engine and its vetting process. A frame is four bytes of length, then that many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")


class OtherEndGone(Exception):
    """The process at the other end of the socket has closed it, or has ended."""


def send_frame(channel: socket.socket, data: bytes) -> None:
    """Send one frame. Raises OtherEndGone, and TimeoutError where the socket has a time limit."""
    try:
        channel.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise OtherEndGone from error


def receive_frame(channel: socket.socket) -> bytes:
    """Receive one frame. Raises OtherEndGone, and TimeoutError where the socket has a time limit."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            received = channel.recv_into(view)
        except TimeoutError:
            raise
        except OSError as error:
            raise OtherEndGone from error
        if not received:
            raise OtherEndGone
        view = view[received:]
    return bytes(data)
