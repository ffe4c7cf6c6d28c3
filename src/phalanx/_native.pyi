"""The native core: messages between the ranks of a group on one host.

Addresses are those of contiguous tensors in host memory (`Tensor.data_ptr()`) that live until the
operation ends; counts are in elements; `dtype` and `op` are numbers out of `DTYPES` and
`REDUCE_OPS`; timeouts are in seconds. Operations block without the GIL and return None, or a
`Status` that says why the group is broken. Nothing is validated here: `phalanx.backend` does that.
"""

from collections.abc import Sequence
from typing import Any

DTYPES: dict[str, int]
REDUCE_OPS: dict[str, int]
LAYOUT_VERSION: int
MAX_RANKS: int
INLINE_BYTES: int
CHUNK_BYTES: int
RING_BYTES: int

def supports(dtype: int, op: int) -> bool:
    """Whether a reduction operator has a meaning for a dtype."""

def instruction_set() -> str:
    """What the reduction kernels run on: "baseline", "avx2" or "avx512"."""

def usable_cores() -> int:
    """Processors that this process may run on."""

def shared_bytes(size: int) -> Any:
    """Zeroed memory in this process's arena: an array with `__dlpack__`. Raises OSError."""

def shared_bytes_in_use() -> int:
    """Bytes of the arena that are allocated, in whole pages."""

def segment_bytes(ranks: int) -> int:
    """Size of the segment of a group; pages come into being when first used."""

class Fingerprint:
    """What a rank said of the operation that it was in."""

    @property
    def sequence(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> int: ...
    @property
    def op(self) -> int: ...

class Status:
    """Why an operation failed: `code` says what, `peer` whom it is about, `reporter` who saw it."""

    @property
    def code(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def reporter(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def mine(self) -> Fingerprint: ...
    @property
    def theirs(self) -> Fingerprint: ...

class Message:
    """One send or recv under way."""

    @property
    def id(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def status(self) -> Status | None: ...
    @property
    def peer(self) -> int: ...

class Group:
    """One rank's view of its group on this host."""

    @staticmethod
    def create(ranks: int, rank: int, nonce: int) -> Group:
        """Make the segment. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, ranks: int, rank: int, nonce: int) -> Group:
        """Open the segment that another process made. Raises OSError (EPROTO: it is another)."""

    @property
    def descriptor(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def outstanding(self) -> int:
        """Messages posted and not done."""

    @property
    def early_peak(self) -> int:
        """The most bytes that messages took in private memory, come before they were asked for."""

    def absent(self) -> list[int]:
        """Ranks that have not joined yet."""

    def connect(self) -> Status | None:
        """Watch the processes of all peers, which must have joined."""

    def pid(self, rank: int) -> int: ...
    def wait_status(self, rank: int) -> int | None:
        """How a rank's process ended (as os.waitpid says it), if it has and the kernel tells."""

    def behind(self, rank: int) -> list[int]:
        """Ranks that have not come as far as `rank` in the group's collectives."""

    def broken(self) -> Status | None: ...
    def abort(self) -> Status | None:
        """Break the group and wake all its ranks."""

    def close(self) -> None:
        """Leave the group and let the segment go, once calls in other threads have returned."""

    def barrier(self, timeout: float) -> Status | None: ...
    def broadcast(
        self, data: int, count: int, dtype: int, root: int, timeout: float
    ) -> Status | None: ...
    def all_reduce(
        self, data: int, count: int, dtype: int, op: int, timeout: float
    ) -> Status | None: ...
    def reduce(
        self, data: int, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> Status | None: ...
    def gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, root: int, timeout: float
    ) -> Status | None: ...
    def scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, root: int, timeout: float
    ) -> Status | None: ...
    def all_gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, timeout: float
    ) -> Status | None: ...
    def reduce_scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Status | None: ...
    def all_gather_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Status | None:
        """As all_gather, to parts of `count` elements, one after another in one tensor."""

    def reduce_scatter_single(
        self, input: int, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Status | None: ...
    def all_to_all_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Status | None: ...
    def all_to_all(
        self,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        outputs: Sequence[int],
        output_counts: Sequence[int],
        dtype: int,
        timeout: float,
    ) -> Status | None:
        """Exchange; counts are those of each rank, `inputs` and `outputs` addresses."""

    def send(
        self, data: int, count: int, dtype: int, destination: int, tag: int, timeout: float
    ) -> Status | None: ...
    def recv(
        self, data: int, count: int, dtype: int, source: int, tag: int, timeout: float
    ) -> int | Status:
        """Receive; the rank that the message came from. `source` -1 is any rank."""

    def isend(self, data: int, count: int, dtype: int, destination: int, tag: int) -> Message: ...
    def irecv(self, data: int, count: int, dtype: int, source: int, tag: int) -> Message:
        """Post a recv; `source` -1 is any rank."""

    def wait(self, message: Message, timeout: float) -> Status | None: ...
    def test(self, message: Message) -> bool:
        """Move what can be moved now; whether the message is done."""

    def watch(self, message: Message, timeout: float) -> None:
        """Have `serve` return the message when it is done, in so many seconds at most."""

    def serve(self) -> list[Message]:
        """Drive messages that nobody waits for, until one that is watched is done or `stop`."""

    def stop(self) -> None: ...
