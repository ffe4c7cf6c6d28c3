"""Messages with all that is in them: loaded by the sender, unloaded by the receiver."""

from __future__ import annotations

import contextlib
import math
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import PhalanxError, RemoteError, UsageError
from phalanx.rpc import seam
from phalanx.rpc.mapped import Gone, Late, Mapped, Unmapped, Unwritten
from phalanx.rpc.shipping import Shipment, pack, unpack
from phalanx.rpc.wire import ANSWERS, FRAME, MOST_TENSORS, Kind, Message, Place, Row, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from phalanx.rpc.arena import Arena, Copies
    from phalanx.rpc.peer import Peer

__all__ = ["Frames", "Freight", "Unreadable"]

Frames = tuple[bytes, "list[memoryview]"]

_SMALL = 4096
"""Up to this size, in bytes, a tensor's data are in the message itself: that is faster."""
_LARGE = 128 * 2**10
"""A larger pickle, in bytes, travels as tensors do: through memory, or in frames of its own."""


class _RemoteTraceback(Exception):  # noqa: N818 - it is shown as the cause of another
    """Where the other worker was when it raised what follows."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class Unreadable(PhalanxError):  # noqa: N818 - it says what tensors are
    """Tensors of a message can't be had from the memory of who sent it; who may be dead."""


class Freight:
    """Loads and unloads.

    Args:
        arena: What tensors are sent from.
        unmapped: Called with a worker and what it has sent that couldn't be mapped here.
        unread: Called with a worker and what it has sent that wasn't waited for: `let_go` must be
            called with both, by a thread that may wait.
    """

    def __init__(
        self,
        arena: Arena,
        unmapped: Callable[[Peer, list[Row]], None],
        unread: Callable[[Peer, list[Row]], None],
    ) -> None:
        self._arena, self._mapped = arena, Mapped()
        self._unmapped, self._unread = unmapped, unread
        self.forget = self._mapped.forget

    def plain(self, kind: Kind, source: int, what: object = None, call: int = 0) -> Frames:
        """A message of RPC's own, without anything of the user's."""
        payload = pickle.dumps(what) if what is not None else b""
        return written(kind, source, source, call, payload=payload), []

    def load(
        self,
        kind: Kind,
        peer: Peer,
        source: int,
        root: int,
        call: int,
        what: object,
        said: str,
        extra: int = 0,
        later: Copies | None = None,
    ) -> Frames:
        """A message with an object of the user's.

        Args:
            kind: Of the message.
            peer: Who will get it.
            source: This worker.
            root: On whose behalf it is sent.
            call: Its number.
            what: The object.
            said: What that is, for messages.
            extra: As in `Message`.
            later: Where copies of large tensors may be left until it is sent.

        Raises:
            UsageError: The object can't be sent; `said` tells what it is.
        """
        if what is None:  # as from all that return nothing; it is what no bytes are unpacked to
            return written(kind, source, root, call, extra), []
        shipment = Shipment(peer, kind in ANSWERS)
        payload = pack(what, shipment, said)
        is_apart = len(payload) > _LARGE
        if not shipment.tensors and not is_apart:
            return written(kind, source, root, call, extra, payload=payload), []
        try:
            head = kind, source, root, call, extra
            return self._loaded(head, peer, shipment, payload, said, later)
        except BaseException:
            shipment.cancel()
            raise

    def _loaded(
        self,
        head: tuple[Kind, int, int, int, int],
        peer: Peer,
        shipment: Shipment,
        payload: bytes,
        said: str,
        later: Copies | None,
    ) -> Frames:
        tensors, note = shipment.tensors, b""
        if len(tensors) >= MOST_TENSORS:
            raise UsageError(
                f"{said} can't be sent: {len(tensors)} tensors, of {MOST_TENSORS - 1} that one "
                "call takes; join some, as torch.stack does"
            )
        if tensors:
            tensors, note = seam.graph().send(peer.id, tensors)
        if is_apart := len(payload) > _LARGE:
            tensors = [*tensors, torch.frombuffer(bytearray(payload), dtype=torch.uint8)]
            payload = b""
        rows: list[Row] = []
        here: list[bytes] = []
        behind: list[memoryview] = []
        try:
            # As a list grows, so that those before an error are known.
            rows.extend(self._stowed(tensor, peer, here, behind, later) for tensor in tensors)
            frame = written(*head, rows, note, payload, here, is_apart)
            if len(frame) > FRAME:
                raise UsageError(
                    f"{said} can't be sent: {len(frame)} bytes beside its large tensors, of "
                    f"{FRAME} that one call takes; join small tensors, as torch.cat does"
                )
        except BaseException:
            for row in rows:
                if row.place is Place.SHARED:
                    self._arena.take_back(row.segment, row.block)
            if later is not None:
                later.cancel()
            raise
        return frame, behind

    def failure(
        self, error: BaseException, peer: Peer, source: int, root: int, call: int
    ) -> Frames:
        """A message that carries an exception."""
        trace = error.__traceback__
        # The first is this package's.
        lines = traceback.format_exception(type(error), error, trace and trace.tb_next)
        words = "".join(traceback.format_exception_only(type(error), error)).strip()
        what = words, "".join(lines), None
        try:
            if isinstance(error, Exception):
                whole = (*what[:2], error)
                frames = self.load(Kind.FAILURE, peer, source, root, call, whole, "the exception")
                pickle.loads(pickle.dumps(error))  # one with its own __init__ may only fail here
                return frames
        except Exception:  # noqa: BLE001 - whatever the exception's own code raises
            pass
        return self.load(Kind.FAILURE, peer, source, root, call, what, "the exception")

    def unload(self, message: Message, peer: Peer) -> Any:
        """The object in a message, as `take` and `unpack` say."""
        return self.unpack(message, peer, self.take(message, peer))

    def unpack(self, message: Message, peer: Peer, tensors: list[Tensor]) -> Any:
        """The object in a message, whose tensors were taken.

        Raises:
            BaseException: What the other worker raised, where the message carries that.
        """
        payload: Any = tensors.pop().numpy() if message.is_apart else message.payload
        if tensors:
            tensors = seam.graph().receive(peer.id, tensors, message.note)
        what: Any = None
        if len(payload):
            what = unpack(payload, tensors, Shipment(peer))
        if message.kind is not Kind.FAILURE:
            return what
        words, lines, error = what
        if error is None:
            error = RemoteError(f"{peer} raised {words}")
        error.__cause__ = _RemoteTraceback(f"On {peer}:\n{lines}")
        raise error

    def let_go(self, peer: Peer, rows: list[Row]) -> None:
        """End the leases of what nobody wants any more; blocks until it is written."""
        for row in rows:
            with contextlib.suppress(Gone):
                self._shared(row, peer, math.inf)

    def take(self, message: Message, peer: Peer, end: float = math.inf) -> list[Tensor]:
        """The tensors of a message: all, or none, and then all leases end.

        Blocks until they are written.

        Args:
            message: The message.
            peer: Who sent it.
            end: When to give up, in monotonic seconds.

        Raises:
            Unreadable: One can't be mapped, or won't be written.
            Late: One wasn't written in time.
        """
        tensors: list[Tensor] = []
        unmapped: list[Row] = []
        failed: Exception | None = None
        here, behind = iter(message.here), iter(message.behind)
        for number, row in enumerate(message.rows):
            try:
                tensors.append(self._one(row, peer, here, behind, end))
            except (Late, KeyboardInterrupt):
                rest = message.rows[number:]
                self._unread(peer, [each for each in rest if each.place is Place.SHARED])
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
                if isinstance(error, Unmapped):
                    unmapped.append(row)
        if unmapped:
            self._unmapped(peer, unmapped)
        if isinstance(failed, Gone):
            raise _unreadable(failed, peer, len(unmapped) or 1, len(message.rows)) from None
        if failed is not None:
            try:
                raise failed
            finally:
                del failed
        return tensors

    def _one(
        self,
        row: Row,
        peer: Peer,
        here: Iterator[bytes],
        behind: Iterator[memoryview],
        end: float,
    ) -> Tensor:
        if row.place is Place.SHARED:
            return self._shared(row, peer, end)
        if row.place is Place.HERE:
            return _tensor(row, bytearray(next(here)))
        return _tensor(row, _joined([next(behind) for _ in range(0, row.size, FRAME)]))

    def _shared(self, row: Row, peer: Peer, end: float) -> Tensor:
        return self._mapped.take(row, peer.id, peer.card.pid, peer.nonce, end, peer.is_gone)

    def _stowed(
        self,
        tensor: Tensor,
        peer: Peer,
        here: list[bytes],
        behind: list[memoryview],
        later: Copies | None,
    ) -> Row:
        size = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        if size <= _SMALL:
            here.append(_bytes(tensor))
            return Row(tensor.dtype, Place.HERE, shape)
        if peer.is_near:
            return self._arena.put(tensor, peer.id, later)
        try:
            data = _flat(tensor).numpy().data
        except (RuntimeError, MemoryError) as error:
            raise PhalanxError(
                f"no room for a tensor of {shape} ({size} bytes) that is to be sent: {error}"
            ) from None
        behind.extend(data[at : at + FRAME] for at in range(0, size, FRAME))
        return Row(tensor.dtype, Place.BEHIND, shape)


def _unreadable(error: Gone, peer: Peer, count: int, total: int) -> Unreadable:
    if isinstance(error, Unwritten):
        return Unreadable(f"tensors from {peer} didn't come: {error}")
    return Unreadable(
        f"{count} of {total} tensors from {peer} can't be mapped: {error}; look at `ulimit -n`, "
        "`ulimit -v` and at free memory"
    )


def _bytes(tensor: Tensor) -> bytes:
    if tensor.dtype is torch.bfloat16 or tensor.is_conj() or tensor.is_neg():
        tensor = _flat(tensor)
    return tensor.numpy().tobytes()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _joined(frames: list[memoryview]) -> memoryview | bytearray:
    return frames[0] if len(frames) == 1 else bytearray().join(frames)


def _tensor(row: Row, data: bytearray | memoryview) -> Tensor:
    if row.size == 0:
        return torch.empty(row.shape, dtype=row.dtype)
    if isinstance(data, memoryview) and data.readonly:
        data = bytearray(data)
    flat = torch.frombuffer(data, dtype=row.dtype)
    # NumPy and PyTorch's kernels expect elements at multiples of their size.
    if flat.data_ptr() % row.dtype.itemsize:
        flat = flat.clone()
    return flat.view(row.shape)
