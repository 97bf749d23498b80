"""What the worker sends, without ever waiting for the client: the back-pressure of the protocol.

In: messages, and the acks of the client. Out: bytes on a stream, written by a thread. While more messages
than the window are without an ack, progress is combined to the newest and logs are counted instead of sent;
all other messages are kept in order.
"""

import json
import threading
import time
from collections import deque
from typing import BinaryIO

from graftwork.process.framing import Framing, encode
from graftwork.records.worker_protocol import LogMessage, ProgressMessage, WorkerMessage

CLOSING_SECONDS = 30.0
LAST_ACK_SECONDS = 5.0
"""How long a worker stays for the ack of its last message. A client whose acks meet a closed pipe may lose
what it has not read yet, so a worker with a window leaves after its client has taken everything."""


class MessageOutbox:
    def __init__(self, stream: BinaryIO, framing: Framing, *, window: int = 0) -> None:
        self.window = window
        self._stream, self._framing = stream, framing
        self._changed = threading.Condition()
        self._kept: deque[WorkerMessage] = deque()
        self._progress: ProgressMessage | None = None
        self._dropped = 0
        self._seq = self._acked = 0
        self._closing = self._broken = self._client_left = False
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="messages")
        self._thread.start()

    def send(self, message: WorkerMessage) -> None:
        """Queue it. Never blocks; nothing is sent any more once the client is gone."""
        with self._changed:
            if isinstance(message, ProgressMessage):
                self._progress = message
            elif isinstance(message, LogMessage) and self._is_full():
                self._dropped += 1
            else:
                if isinstance(message, LogMessage) and self._dropped:
                    message = message.model_copy(update={"dropped": self._dropped})
                    self._dropped = 0
                self._kept.append(message)
            self._changed.notify_all()

    def acknowledge(self, seq: int) -> None:
        with self._changed:
            self._acked = max(self._acked, min(seq, self._seq))
            self._changed.notify_all()

    def end_acks(self) -> None:
        """The client has closed its side: no ack will come."""
        with self._changed:
            self._client_left = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, unless the client does not take it, and wait a moment for the last ack."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)
        with self._changed:
            self._changed.wait_for(self._is_taken, LAST_ACK_SECONDS)

    def _is_taken(self) -> bool:
        return self.window == 0 or self._client_left or self._broken or self._acked >= self._seq

    def _is_full(self) -> bool:
        waiting = self._seq - self._acked + len(self._kept)
        return self.window > 0 and waiting >= self.window

    def _write_all(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._stream.write(self._encode(message))
                self._stream.flush()
            except (OSError, ValueError):
                # The client is gone: the end of standard input says the same to the work.
                with self._changed:
                    self._broken = True
                return

    def _next(self) -> WorkerMessage | None:
        """The next message with its number: from here on it waits for an ack."""
        with self._changed:
            while True:
                if self._kept:
                    return self._number(self._kept.popleft())
                if self._progress is not None and not self._is_full() and not self._closing:
                    newest, self._progress = self._progress, None
                    return self._number(newest)
                if self._closing:
                    return None
                self._changed.wait()

    def _number(self, message: WorkerMessage) -> WorkerMessage:
        self._seq += 1
        return message.model_copy(update={"seq": self._seq, "at": time.time()})

    def _encode(self, message: WorkerMessage) -> bytes:
        body = {"type": None, **message.model_dump(mode="json")}
        return encode(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), self._framing)
