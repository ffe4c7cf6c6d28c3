"""Encoding and decoding of whole messages with their tensors."""

from __future__ import annotations

import contextlib
import math
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import PhalanxError, RemoteError, UsageError
from phalanx.rpc.message import (
    ANSWERS,
    MAX_FRAME_SIZE,
    MAX_TENSORS,
    WITHOUT_NUMPY,
    Frames,
    Kind,
    Message,
    TensorDescriptor,
    TensorLocation,
    encode_frame,
    span,
)
from phalanx.rpc.peer import Peer
from phalanx.rpc.pickling import AutogradHook, PickleContext, deserialize, serialize
from phalanx.rpc.shared_memory import (
    CopyFailure,
    CopyTimeout,
    DeferredCopies,
    MappingFailure,
    SegmentUnavailable,
    ShmReceiver,
    ShmSender,
)

_MAX_INLINE_TENSOR = 4096
"""The maximum size, in bytes, of a tensor whose data are in the message itself: that is faster."""
_MAX_INLINE_PICKLE = 128 * 2**10
"""The maximum size, in bytes, of a pickle in the message itself.

A larger one is sent as tensors are: in shared memory, or in frames of its own.
"""


class _RemoteTraceback(Exception):  # noqa: N818 - shown as the cause of another
    """The traceback of an exception on the other worker."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class TensorsUnavailable(PhalanxError):  # noqa: N818 - the state of tensors
    """Tensors of a message cannot be read from the memory of the sender, which may be dead."""


class MessageCodec:
    """An encoder and decoder of messages.

    Args:
        source: The id of this worker.
        shm_sender: The shared memory from which tensors are sent.
        hook: The hook that tensors pass through.
        on_unmapped: Called with a worker and the tensors from it that could not be mapped here.
        on_unread: Called with a worker and the tensors from it that were not waited for.
            `discard_tensors` must then be called with both, by a thread that may block.
    """

    def __init__(
        self,
        source: int,
        shm_sender: ShmSender,
        hook: AutogradHook,
        on_unmapped: Callable[[Peer, list[TensorDescriptor]], None],
        on_unread: Callable[[Peer, list[TensorDescriptor]], None],
    ) -> None:
        self._source, self._hook = source, hook
        self._shm_sender, self._shm_receiver = shm_sender, ShmReceiver()
        self._on_unmapped, self._on_unread = on_unmapped, on_unread
        self.forget = self._shm_receiver.forget

    def encode_plain(self, kind: Kind, body: object = None) -> Frames:
        """Return an internal message, which contains no object of the user's."""
        payload = pickle.dumps(body) if body is not None else b""
        return encode_frame(kind, self._source, payload=payload), []

    def encode(
        self,
        kind: Kind,
        peer: Peer,
        call: int,
        body: object,
        description: str,
        extra: int = 0,
        copies: DeferredCopies | None = None,
    ) -> Frames:
        """Return a message that contains an object of the user's.

        Args:
            kind: The kind of the message.
            peer: The receiver.
            call: The number of the call.
            body: The object.
            description: A description of the object, for error messages.
            extra: As in `Message`.
            copies: Takes copies of large tensors, to be made after the message has been sent.

        Raises:
            UsageError: The object cannot be sent.
            PhalanxError: There is no room for a tensor.
        """
        head = kind, self._source, call, extra
        if body is None:  # frequent; an empty payload is unpacked to None
            return encode_frame(*head), []
        pickle_context = PickleContext(peer, self._hook, kind in ANSWERS)
        payload = serialize(body, pickle_context, description)
        return self._encode_payload(head, peer, pickle_context, payload, description, copies)

    def _encode_payload(
        self,
        head: tuple[Kind, int, int, int],
        peer: Peer,
        pickle_context: PickleContext,
        payload: bytes,
        description: str,
        copies: DeferredCopies | None = None,
    ) -> Frames:
        if not pickle_context.tensors and len(payload) <= _MAX_INLINE_PICKLE:
            return encode_frame(*head, payload=payload), []
        try:
            return self._encode_tensors(head, peer, pickle_context, payload, description, copies)
        except BaseException:
            pickle_context.cancel()
            raise

    def _encode_tensors(
        self,
        head: tuple[Kind, int, int, int],
        peer: Peer,
        pickle_context: PickleContext,
        payload: bytes,
        description: str,
        copies: DeferredCopies | None,
    ) -> Frames:
        tensors, metadata = pickle_context.tensors, b""
        if len(tensors) >= MAX_TENSORS:
            raise UsageError(
                f"{description} cannot be sent: it has {len(tensors)} tensors, but one call takes "
                f"at most {MAX_TENSORS - 1}; join some, for example by torch.stack"
            )
        if tensors:
            tensors, metadata = self._hook.send(peer.id, tensors)
        if is_pickle_in_tensor := len(payload) > _MAX_INLINE_PICKLE:
            tensors = [*tensors, torch.frombuffer(bytearray(payload), dtype=torch.uint8)]
            payload = b""
        descriptors: list[TensorDescriptor] = []
        inline_data: list[bytes] = []
        out_of_band: list[memoryview] = []
        try:
            # `extend` keeps the rows before an error, so that their leases can be ended.
            descriptors.extend(
                self._encode_tensor(tensor, peer, inline_data, out_of_band, copies)
                for tensor in tensors
            )
            frame = encode_frame(
                *head, descriptors, metadata, payload, inline_data, is_pickle_in_tensor
            )
            if len(frame) > MAX_FRAME_SIZE:
                raise UsageError(
                    f"{description} cannot be sent: it has {len(frame)} bytes besides its large "
                    f"tensors, but one call takes at most {MAX_FRAME_SIZE}; join small tensors, "
                    "for example by torch.cat"
                )
        except BaseException:
            for descriptor in descriptors:
                if descriptor.location is TensorLocation.SHARED:
                    self._shm_sender.reclaim(descriptor.segment, descriptor.block)
            if copies is not None:
                copies.cancel()
            self._hook.cancel(metadata)
            raise
        return frame, out_of_band

    def encode_exception(self, error: BaseException, peer: Peer, call: int) -> Frames:
        """Return a message that carries an exception, as text and, if possible, pickled.

        The pickle is within that of the text, which thus arrives even if the exception's class
        cannot be loaded there.
        """
        trace = error.__traceback__
        # The first frame is this package's.
        lines = "".join(traceback.format_exception(type(error), error, trace and trace.tb_next))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        head, description = (Kind.FAILURE, self._source, call, 0), "the exception"
        try:
            if isinstance(error, Exception):
                context = PickleContext(peer, self._hook, is_answer=True)
                body = summary, lines, serialize(error, context, description)
                frames = self._encode_payload(head, peer, context, pickle.dumps(body), description)
                pickle.loads(pickle.dumps(error))  # its own __init__ may make this fail
                return frames
        except Exception:  # noqa: BLE001 - whatever the exception's own code raises
            pass
        return self.encode(Kind.FAILURE, peer, call, (summary, lines, b""), description)

    def decode(self, message: Message, peer: Peer, end: float = math.inf) -> Any:
        """Return the object in a message; block until its tensors are written.

        Args:
            message: The message.
            peer: The sender.
            end: The deadline, in monotonic seconds.

        Raises:
            TensorsUnavailable: A tensor cannot be mapped, or will never be written.
            CopyTimeout: A tensor was not written in time.
            UsageError: The object is an answer, and a class in it cannot be loaded here.
            BaseException: The exception of the other worker, if the message carries one.
        """
        tensors = self._read_tensors(message, peer, end) if message.descriptors else []
        payload: Any = tensors.pop().numpy() if message.is_pickle_in_tensor else message.payload
        if tensors:
            tensors = self._hook.receive(peer.id, tensors, message.metadata)
        if not len(payload):
            return None
        pickle_context = PickleContext(peer, self._hook)
        if message.kind is Kind.FAILURE:
            raise _load_exception(payload, tensors, pickle_context, peer)
        try:
            return deserialize(payload, tensors, pickle_context)
        except (AttributeError, ImportError) as error:
            if message.kind not in ANSWERS:
                raise
            raise UsageError(
                f"the result from {peer} cannot be loaded on this worker: {error}. Classes and "
                "functions are sent by their names: both workers need the same modules"
            ) from error

    def discard_tensors(self, peer: Peer, descriptors: list[TensorDescriptor]) -> None:
        """End the leases of unwanted tensors; block until these are written."""
        for descriptor in descriptors:
            with contextlib.suppress(SegmentUnavailable):
                self._map_tensor(descriptor, peer, math.inf)

    def _read_tensors(self, message: Message, peer: Peer, end: float) -> list[Tensor]:
        """Return all tensors of a message, or return none and end all leases."""
        tensors: list[Tensor] = []
        unmapped: list[TensorDescriptor] = []
        failed: Exception | None = None
        inline_data, out_of_band = iter(message.inline_data), iter(message.out_of_band)
        for number, descriptor in enumerate(message.descriptors):
            try:
                tensors.append(self._read_tensor(descriptor, peer, inline_data, out_of_band, end))
            except (CopyTimeout, KeyboardInterrupt):
                rest = message.descriptors[number:]
                self._on_unread(
                    peer, [each for each in rest if each.location is TensorLocation.SHARED]
                )
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
                if isinstance(error, MappingFailure):
                    unmapped.append(descriptor)
        if unmapped:
            self._on_unmapped(peer, unmapped)
        if isinstance(failed, CopyFailure):
            raise TensorsUnavailable(f"tensors from {peer} were not received: {failed}") from None
        if isinstance(failed, SegmentUnavailable):
            raise TensorsUnavailable(
                f"{len(unmapped) or 1} of {len(message.descriptors)} tensors from {peer} cannot be "
                f"mapped: {failed}; check `ulimit -n`, `ulimit -v` and free memory"
            ) from None
        if failed is not None:
            try:
                raise failed
            finally:
                del failed
        return tensors

    def _read_tensor(
        self,
        descriptor: TensorDescriptor,
        peer: Peer,
        inline_data: Iterator[bytes],
        out_of_band: Iterator[memoryview],
        end: float,
    ) -> Tensor:
        if descriptor.location is TensorLocation.SHARED:
            return self._map_tensor(descriptor, peer, end)
        if descriptor.location is TensorLocation.INLINE:
            return _decode_tensor(descriptor, bytearray(next(inline_data)))
        frames = [next(out_of_band) for _ in range(0, descriptor.size, MAX_FRAME_SIZE)]
        return _decode_tensor(
            descriptor, frames[0] if len(frames) == 1 else bytearray().join(frames)
        )

    def _map_tensor(self, descriptor: TensorDescriptor, peer: Peer, end: float) -> Tensor:
        return self._shm_receiver.map_tensor(
            descriptor, peer.id, peer.record.pid, peer.nonce, end, peer.is_unreachable
        )

    def _encode_tensor(
        self,
        tensor: Tensor,
        peer: Peer,
        inline_data: list[bytes],
        out_of_band: list[memoryview],
        copies: DeferredCopies | None,
    ) -> TensorDescriptor:
        if not tensor.is_contiguous():
            tensor = tensor.resolve_conj().resolve_neg()  # this may change the strides
        if not tensor.is_contiguous() and (storage := _get_storage(tensor)) is not None:
            descriptor = self._encode_tensor(storage, peer, inline_data, out_of_band, copies)
            return descriptor._replace(
                shape=tuple(tensor.shape), strides=tensor.stride(), storage_numel=storage.numel()
            )
        size = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        if size <= _MAX_INLINE_TENSOR:
            inline_data.append(_to_bytes(tensor))
            return TensorDescriptor(tensor.dtype, TensorLocation.INLINE, shape)
        if peer.is_local:
            return self._shm_sender.put(tensor, peer.id, copies)
        try:
            data = _flatten(tensor).numpy().data
        except (RuntimeError, MemoryError) as error:
            raise PhalanxError(
                f"not enough memory to send a tensor of {shape} ({size} bytes): {error}"
            ) from None
        out_of_band.extend(data[at : at + MAX_FRAME_SIZE] for at in range(0, size, MAX_FRAME_SIZE))
        return TensorDescriptor(tensor.dtype, TensorLocation.OUT_OF_BAND, shape)


def _load_exception(
    payload: Any, tensors: list[Tensor], pickle_context: PickleContext, peer: Peer
) -> BaseException:
    """Return the exception of another worker, with its text as the cause."""
    summary, lines, pickled = pickle.loads(payload)
    error: BaseException | None = None
    reason = f"it cannot be sent by {peer}"
    if pickled:
        try:
            error = deserialize(pickled, tensors, pickle_context)
        except Exception as problem:  # noqa: BLE001 - its class may be missing here
            reason = f"it cannot be loaded on this worker ({type(problem).__name__}: {problem})"
    if error is None:
        error = RemoteError(f"Original exception on remote side was {summary}: {reason}")
    error.__cause__ = _RemoteTraceback(f"On {peer}:\n{lines}")
    return error


def _get_storage(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor as they lie in memory, in one dimension.

    Return None if the elements between them would more than double a large message.
    """
    count = span(tensor.shape, tensor.stride())
    if count * tensor.element_size() > _MAX_INLINE_TENSOR and count > 2 * tensor.numel():
        return None
    return tensor.as_strided((count,), (1,))


def _to_bytes(tensor: Tensor) -> bytes:
    if tensor.dtype in WITHOUT_NUMPY or tensor.is_conj() or tensor.is_neg():
        tensor = _flatten(tensor)
    return tensor.numpy().tobytes()


def _flatten(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _decode_tensor(descriptor: TensorDescriptor, data: bytearray | memoryview) -> Tensor:
    if descriptor.size == 0:
        return torch.empty(descriptor.shape, dtype=descriptor.dtype, device="cpu")
    if isinstance(data, memoryview) and data.readonly:
        data = bytearray(data)
    flat = torch.frombuffer(data, dtype=descriptor.dtype)
    # NumPy and PyTorch's kernels expect elements that are aligned to their size.
    if flat.data_ptr() % descriptor.dtype.itemsize:
        flat = flat.clone()
    return (
        flat.view(descriptor.shape)
        if descriptor.strides is None
        else flat.as_strided(descriptor.shape, descriptor.strides)
    )
