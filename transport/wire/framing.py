"""Framing of messages, with three priorities, fragments, and several small messages in a frame. Sans-IO.

A frame's plaintext is a sequence of records `flags u8, length u16, bytes`. Bits 0-1 of the flags are the priority, and bit 2 is
the channel. Bit 3 is set if the message continues in a later record of the same priority. Each priority has at most one
unfinished message, and Noise keeps the order of frames, so records need no numbers.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from protocol.errors import RemoteProtocolError
from protocol.limits import FRAME_BYTES_MAX, MESSAGE_BYTES_MAX
from transport.quotas.memory_quota import MemoryAccount

TAG_BYTES = 16  # bytes of Poly1305's authentication tag
FRAME_PLAINTEXT_MAX = min(FRAME_BYTES_MAX, 65535) - TAG_BYTES  # A Noise message has at most 65535 bytes.
# Bytes charged for each queued message besides its length, so that the number of empty messages is bounded too.
MESSAGE_OVERHEAD_BYTES = 64

ByPriority = tuple[int, int, int]  # one number per Priority, which is the index

_RECORD = struct.Struct(">BH")
_MORE = 0b1000
_FRAGMENT_BYTES_MIN = 512  # least free bytes of a frame in which another message begins, since small fragments are inefficient


class Priority(enum.IntEnum):
    """Priorities of messages. A frame is filled with votes first, then control, then bulk."""

    VOTE = 0  # messages for decisions, never dropped: a peer that receives too slowly loses its connection
    CONTROL = 1
    BULK = 2


# Limits of the queued bytes for one peer, by priority. Each queue must have room for one message of the largest size.
QUEUE_BYTES_MAX: Mapping[Priority, int] = {
    Priority.VOTE: 2 * MESSAGE_BYTES_MAX,
    Priority.CONTROL: 2 * MESSAGE_BYTES_MAX,
    Priority.BULK: 2 * MESSAGE_BYTES_MAX,
}


class Channel(enum.IntEnum):
    APPLICATION = 0  # messages that transport does not interpret
    LINK = 1  # messages of the link itself, which transport handles


@dataclass(frozen=True, slots=True)
class Message:
    channel: Channel
    priority: Priority
    data: bytes


class Outbox:
    """The queued messages for one peer. They are put into frames only by `next_frame`."""

    def __init__(self) -> None:
        self._queues: tuple[deque[tuple[Channel, bytes]], ...] = (deque(), deque(), deque())
        self._offsets = [0, 0, 0]  # by priority, the bytes of the first message that are already sent
        self._waiting = [0, 0, 0]
        self._sent = [0, 0, 0]
        self.account = MemoryAccount()  # account that is charged for queued bytes
        self._is_over = False

    def __bool__(self) -> bool:
        return any(self._queues)

    def has_waiting(self, priority: Priority) -> bool:
        return bool(self._queues[priority])

    @property
    def held(self) -> int:
        """The number of queued bytes, including MESSAGE_OVERHEAD_BYTES for each message."""
        return sum(self._waiting)

    @property
    def sent(self) -> ByPriority:
        return self._sent[0], self._sent[1], self._sent[2]

    def push(self, channel: Channel, data: bytes, priority: Priority) -> bool:
        assert len(data) <= MESSAGE_BYTES_MAX, f"a message of {len(data)} bytes is larger than any peer accepts"
        size = len(data) + MESSAGE_OVERHEAD_BYTES
        if self._is_over or self._waiting[priority] + size > QUEUE_BYTES_MAX[priority]:
            return False
        self._waiting[priority] += size
        self.account.add_bytes(size)
        self._queues[priority].append((channel, data))
        return True

    def finish_with(self, channel: Channel, data: bytes) -> None:
        """Replace all queued messages by a last message.

        It uses a priority in which no message is sent in part, and is dropped if none exists.
        """
        whole = [priority for priority in Priority if not self._offsets[priority]]
        self.account.add_bytes(-self.held)
        for queue in self._queues:
            queue.clear()
        self._waiting, self._offsets = [0, 0, 0], [0, 0, 0]
        if whole:
            self.push(channel, data, whole[0])
        self._is_over = True

    def withdraw_waiting(self, priority: Priority, unwanted: Callable[[bytes], bool]) -> None:
        """Remove the `unwanted` messages of a priority, except a message that is sent in part."""
        queue = self._queues[priority]
        begun = [queue.popleft()] if self._offsets[priority] else []
        kept = [message for message in queue if not unwanted(message[1])]
        gone = sum(len(data) + MESSAGE_OVERHEAD_BYTES for _, data in queue)
        gone -= sum(len(data) + MESSAGE_OVERHEAD_BYTES for _, data in kept)
        self._waiting[priority] -= gone
        self.account.add_bytes(-gone)
        queue.clear()
        queue.extend([*begun, *kept])

    def move_waiting(self, other: Outbox, priority: Priority) -> None:
        """Move messages to another outbox while that has room, except a message that is sent in part."""
        queue = self._queues[priority]
        begun = [queue.popleft()] if self._offsets[priority] else []
        while queue and other.push(*queue[0], priority):
            size = len(queue.popleft()[1]) + MESSAGE_OVERHEAD_BYTES
            self._waiting[priority] -= size
            self.account.add_bytes(-size)
        queue.extendleft(begun)

    def next_frame(self, capacity: int = FRAME_PLAINTEXT_MAX, priorities: Iterable[Priority] = Priority) -> bytes:
        """Return the plaintext of the next frame, empty if no message is queued.

        A receiver can decrypt a frame only when all of it has arrived. So on a slow link, where frames are small, no bulk data
        follows a vote in its frame.
        """
        records: list[bytes | memoryview] = []
        is_small, votes = capacity < FRAME_PLAINTEXT_MAX, self._sent[Priority.VOTE]
        for priority in priorities:
            if priority is Priority.BULK and is_small and self._sent[Priority.VOTE] > votes:
                break
            while self._queues[priority] and capacity > _RECORD.size + (_FRAGMENT_BYTES_MIN if records else 0):
                capacity -= self._append_record(priority, capacity - _RECORD.size, records)
        return b"".join(records)

    def _append_record(self, priority: Priority, room: int, records: list[bytes | memoryview]) -> int:
        channel, data = self._queues[priority][0]
        start = self._offsets[priority]
        end = min(len(data), start + room)
        more = _MORE if end < len(data) else 0
        records.append(_RECORD.pack(priority | channel << 2 | more, end - start))
        records.append(memoryview(data)[start:end])
        self._offsets[priority] = end if more else 0
        self._sent[priority] += end - start
        if not more:
            self._queues[priority].popleft()
            self._waiting[priority] -= len(data) + MESSAGE_OVERHEAD_BYTES
            self.account.add_bytes(-len(data) - MESSAGE_OVERHEAD_BYTES)
        return _RECORD.size + end - start


class Inbox:
    """The receiver of frames, which joins fragments into messages. Each priority has at most one unfinished message."""

    def __init__(self) -> None:
        self._partial: list[bytearray | None] = [None, None, None]
        self._channels = [Channel.APPLICATION] * 3
        self._received = [0, 0, 0]
        self.account = MemoryAccount()  # account that is charged for incomplete messages

    @property
    def held(self) -> int:
        """Bytes of incomplete messages."""
        return sum(len(partial) for partial in self._partial if partial is not None)

    @property
    def received(self) -> ByPriority:
        return self._received[0], self._received[1], self._received[2]

    def receive_frame(self, frame: bytes) -> list[Message]:
        """Return the messages that `frame` completes.

        Raises `RemoteProtocolError` for invalid bytes; then the inbox is unusable.
        """
        messages: list[Message] = []
        position = 0
        while position < len(frame):
            if position + _RECORD.size > len(frame):
                raise RemoteProtocolError("bad-record", "a frame ends inside a record's header")
            flags, length = _RECORD.unpack_from(frame, position)
            position += _RECORD.size
            if position + length > len(frame):
                raise RemoteProtocolError("bad-record", "a record is longer than its frame")
            self._take_record(flags, frame[position : position + length], messages)
            position += length
        return messages

    def _take_record(self, flags: int, data: bytes, messages: list[Message]) -> None:
        if flags > 0b1111 or flags & 0b11 > Priority.BULK:
            raise RemoteProtocolError("bad-record", f"invalid flags {flags:#x}")
        priority, channel = Priority(flags & 0b11), Channel(flags >> 2 & 1)
        self._received[priority] += len(data)
        partial = self._partial[priority]
        if partial is None and not flags & _MORE:
            messages.append(Message(channel, priority, data))
            return
        messages.extend(self._join(priority, channel, partial, data, bool(flags & _MORE)))

    def _join(self, priority: Priority, channel: Channel, partial: bytearray | None, data: bytes, more: bool) -> list[Message]:
        if not data:
            raise RemoteProtocolError("bad-record", "a fragment is empty")
        if partial is None:
            self._channels[priority] = channel
            partial = bytearray()
        if channel != self._channels[priority]:
            raise RemoteProtocolError("bad-record", "a message changes its channel")
        if len(partial) + len(data) > MESSAGE_BYTES_MAX:
            raise RemoteProtocolError("oversized", f"a message has more than {MESSAGE_BYTES_MAX} bytes")
        partial += data
        self._partial[priority] = partial if more else None
        self.account.add_bytes(len(data) if more else len(data) - len(partial))
        return [] if more else [Message(channel, priority, bytes(partial))]
