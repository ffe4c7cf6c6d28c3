"""The native core: messages between the ranks of a group on one host.

Addresses are those of contiguous tensors in host memory (`Tensor.data_ptr()`) that live until the
operation ends. Counts are in elements, timeouts in seconds; `dtype` and `op` are values of `DTYPES`
and `REDUCE_OPS`. Operations block without the GIL and return None, or a `Status` that says why the
group is broken. Nothing is validated here: `phalanx.backend` does that.
"""

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.backend.compiled import PreparedOperation

_Ints = Sequence[int]

DTYPES: dict[str, int]
REDUCE_OPS: dict[str, int]
ENCODINGS: dict[str, int]
LAYOUT_VERSION: int
MAX_RANKS: int
SMALL_BYTES: int
CHUNK_BYTES: int
RING_BYTES: int
PAGE_BYTES: int
MAX_BLOCKS: int

def supports(dtype: int, op: int) -> bool:
    """Return whether a reduction operator is defined for a dtype."""

def reduce(output: int, sources: _Ints, count: int, dtype: int, op: int, divisor: float) -> None:
    """Combine buffers, in this order, into `output`, which may be one of them.

    `divisor` is used by "avg" only.
    """

def quantized_size(count: int, encoding: int) -> int:
    """Return the size of `count` encoded float32 elements in bytes."""

def quantize(output: int, values: int, residual: int, count: int, encoding: int) -> None:
    """Encode `count` float32 values, with the residual added; the residual becomes what is lost.

    `residual` is the address of as many float32 elements, or 0.
    """

def dequantize(output: int, encoded: int, count: int, encoding: int) -> None:
    """Decode `count` float32 values."""

def overlap(
    inputs: _Ints, input_counts: _Ints, outputs: _Ints, output_counts: _Ints, dtype: int
) -> bool:
    """Return whether an input shares memory with an output. Outputs must not overlap each other."""

def have_common_memory(starts: _Ints, sizes: _Ints) -> bool:
    """Return whether two of several parts, of so many bytes each, share memory."""

def is_misplaced(part: int, parts: _Ints, count: int, dtype: int, rank: int) -> bool:
    """Return whether `part` overlaps any of `parts` without being exactly the one of `rank`.

    All parts have `count` elements.
    """

def instruction_set() -> str:
    """Return the instruction set of the reduction kernels: "baseline", "avx2" or "avx512"."""

def read_flight_recorder(data: bytes, history: int) -> dict[str, Any]:
    """Parse the file of a flight recorder into checked texts and numbers.

    Keys: pid, rank, world_size, attempt, host, job, clock, opened, ending, exception, ended, note,
    operations (the number of operations begun), main_thread_wait (the number of the operation that
    the main thread waits for while a group's thread runs it; 0 for none), lone_wait (the number of
    the operation that it waits for while no other thread can begin one), groups (list of dicts with
    the fields of `phalanx.diagnosis.model.Group`; members as the text "0-3,6"), open and done
    (lists of dicts with the fields of `phalanx.diagnosis.model.Operation`; done: the newest
    `history` of them, oldest first), reports (list of (time, step, loss)), links (list of dicts:
    host, now and earlier as in `record_link`), torn (the number of records that were being written
    when the file was copied).

    Raises:
        ValueError: The data are not a flight recorder, have another layout version, or are damaged.
            The message says which.
    """

def flight_recorder_bytes() -> int:
    """Return the size of the file of a flight recorder."""

def open_flight_recorder(
    descriptor: int, rank: int, world_size: int, attempt: int, host: str, job: str
) -> None:
    """Make the file behind `descriptor`, of that size, the flight recorder of this process.

    Raises:
        OSError: The file cannot be mapped.
    """

def has_flight_recorder() -> bool: ...
def detach_flight_recorder() -> None:
    """Stop recording, in a forked child: the flight recorder belongs to its parent."""

def set_main_thread_wait(number: int) -> None:
    """Record the operation of a group's thread that the main thread waits for; 0 for none.

    Call it in the main thread.
    """

def set_lone_wait(number: int) -> None:
    """Record the operation that the main thread waits for while no other thread can begin one.

    0 for none. Call it in the main thread.
    """

def add_link(host: str) -> int:
    """Return the number of the link to a host in the flight recorder; -1 if it has no place."""

def record_link(link: int, now: tuple[int, int, int], earlier: tuple[int, int, int]) -> None:
    """Record the bytes that a link has sent and received until some time, in nanoseconds.

    Args:
        link: The number that `add_link` returned; nothing is recorded if it is -1.
        now: The bytes sent and received so far, and the time (monotonic).
        earlier: The same at an earlier time, from which readers compute the bandwidth.
    """

def report(step: int, loss: float | None, note: str) -> None:
    """Write training progress to the flight recorder, if there is one."""

def record_ending(ending: str, exception: str) -> None:
    """Record how this process ends: "left", "exited" or "failed", with the exception in a line."""

class GroupFormation:
    """The record of a group that is being formed, in the flight recorder."""

    def __init__(self, name: str, rank: int, size: int, members: str) -> None: ...
    @property
    def entry(self) -> int:
        """The group's entry in the flight recorder, for `Group.create` and `Group.open`."""

    def waiting_for(self, rank: int) -> None: ...
    def end(self, outcome: str) -> None:
        """Record the outcome, once: "ok", "timeout", "interrupted" or "system"."""

def set_library_code(prefixes: list[str]) -> None:
    """Set the path prefixes of code that is not the user's."""

def call_site() -> int:
    """Return the number of this thread's call site in the user's code; 0 if there is none."""

def call_site_text(number: int) -> str:
    """Return the "path:line" of a call site; empty for 0."""

def set_caller(site: int) -> None:
    """Set the call site of the next operation, in a thread that runs operations for others."""

def set_watcher(call: Callable[[], bool]) -> None:
    """Have `call` called in a thread that has waited for a second, and then at growing intervals.

    If it returns True, because it suspects a deadlock, it is called again half a second later.
    """

def usable_cores() -> int:
    """Return the number of processors that this process may run on."""

def allocate_shared(size: int) -> Any:
    """Allocate zeroed memory in this process's arena: an array with `__dlpack__`.

    Raises:
        OSError: There is not enough memory.
    """

def shared_bytes_in_use() -> int:
    """Return the number of allocated bytes of the arena, in whole pages."""

class CowMemory:
    """Memory that the ranks of a host hold once, with copy-on-write for each rank's own changes.

    All ranks see what is written to the shared view. The private view shows the same until this
    process writes to a page of it. That page is then a private copy until it is published or
    dropped. Nothing synchronises here.
    """

    @staticmethod
    def create(size: int) -> CowMemory:
        """Allocate zeroed memory in whole pages. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, size: int) -> CowMemory:
        """Open memory of `size` bytes made by another process. Raises OSError (EPROTO: other)."""

    @property
    def descriptor(self) -> int: ...
    def close_descriptor(self) -> None:
        """Close the descriptor, once all have opened the memory. Mappings and arrays stay valid."""

    def shared_view(self, offset: int, size: int) -> Any:
        """Return a part of the memory: an array of uint8 with `__dlpack__` and its own storage."""

    def private_view(self, offset: int, size: int) -> Any: ...
    def publish(self, offset: int, size: int) -> int:
        """Write the private copies of pages in a range to the shared view, and drop them.

        The range consists of whole pages. Returns the number of pages.
        """

    def drop(self, offset: int, size: int) -> int:
        """Drop the private copies of pages in a range; returns the number of pages."""

def coalesce_rows(
    batches: Sequence[tuple[int, int, int, int, int, int, int]],
    width: int,
    dtype: int,
    divisor: float,
    shard: tuple[int, int],
    output: tuple[int, int],
) -> int:
    """Sum gradients as `phalanx.embedding.batch.sum_gradients` does; return the row count."""

def create_sealed_memory(name: str, size: int) -> int:
    """Create memory that can no longer be resized; return its descriptor. Raises OSError."""

class Lease:
    """A block that this process has taken from another: a buffer of its bytes, writable.

    The end of this object gives the block back, but not in a forked child.
    """

class LeaseSegment:
    """A segment of blocks of one size, which its owner leases to other processes on its host.

    Blocks and leases are identified by their numbers.
    """

    @staticmethod
    def create(number: int, block_size: int, blocks: int, nonce: int) -> LeaseSegment:
        """Create a segment; its pages are allocated when they are written. Raises OSError."""

    @property
    def number(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def leased(self) -> int:
        """The number of blocks that are not free."""

    @property
    def used(self) -> int:
        """The number of blocks that were ever leased."""

    def lease(self, holder: int) -> tuple[int, int] | None:
        """Lease a block to a process; return block and lease, or None if no block is free.

        A copy must follow, which `write` or `finish` ends.
        """

    def write(self, block: int, lease: int, data: int, size: int) -> None:
        """Copy data to a block, and end the copy."""

    def view(self, block: int) -> Any:
        """Return the memory of a block: uint8 with `__dlpack__`."""

    def finish(self, block: int, lease: int, state: str) -> None:
        """End a copy: "leased", "unwritten" if it was not made, "free" if no holder waits for it.

        Does nothing if the copy had ended.
        """

    def take_back(self, block: int, holder: int | None) -> None:
        """Free a block, once no copy is under way; if there is a `holder`, only if it is its."""

    def take_back_all(self, holder: int) -> None:
        """Free all blocks of a holder."""

    def close_descriptor(self) -> None: ...

class LeaseSegmentView:
    """The segment of another process, mapped."""

    @staticmethod
    def open(pid: int, descriptor: int, nonce: int) -> LeaseSegmentView:
        """Map a segment. Raises OSError (EPROTO: it is something else, or another's)."""

    @property
    def number(self) -> int: ...
    def take(self, block: int, size: int, seconds: float) -> Any:
        """Take a block that was leased to this process; wait up to `seconds` for its copy.

        Returns the `Lease`, or the state of the block: "filling" if the copy is still under way,
        "unwritten" if it was not made, "free" if the owner has leased no such block of that size.
        """

_RowsFailure = tuple[str, int, int, int] | None

class Rows:
    """Rows of floats in shared memory, with their optimizer's state in parts 1 and on.

    Every process that has the table open may read and write at any time: each row is read as some
    write left it, with its state. Addresses are of contiguous tensors: int64 for `rows` and
    `offsets`, the table's dtype elsewhere; `parts` has one address per part, 0 for none. A call
    waits up to `timeout` seconds for a row that another process writes to. It returns None, or the
    reason of its failure: ("index", at, value, 0): number `at` of the rows is out of range, and
    nothing was done; ("offset", at, value, 0): the same for an offset; ("stuck", at, row, pid):
    that process holds the row; ("full", at, 0, 0): too many processes write. In the last two cases
    rows before number `at` were written. `stride` is the distance of two rows in bytes, and `size`
    the size of the table's memory.
    """

    @staticmethod
    def create(rows: int, width: int, parts: int, dtype: int, nonce: int) -> Rows:
        """Create a table of zeros, backed by memory; float32 or float64. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, nonce: int) -> Rows:
        """Open the table of another process. Raises OSError (EPROTO: it is another table)."""

    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def step(self) -> int: ...
    @step.setter
    def step(self, step: int) -> None: ...
    @property
    def descriptor(self) -> int: ...
    def close_descriptor(self) -> None: ...
    def view(self, part: int) -> Any:
        """Return the memory of all rows of a part, unsynchronised: uint8 with `__dlpack__`."""

    def gather(self, rows: int, count: int, parts: _Ints, timeout: float) -> _RowsFailure:
        """Copy rows to `parts`."""

    def write(self, rows: int, count: int, parts: _Ints, timeout: float) -> _RowsFailure:
        """Replace rows by the contents of `parts`; a part without an address stays as it is."""

    def pool(
        self,
        rows: int,
        count: int,
        offsets: int,
        bags: int,
        mode: int,
        weights: int,
        output: int,
        timeout: float,
    ) -> _RowsFailure:
        """Combine the rows of each bag; mode 0 is sum, 1 mean, 2 max; `weights` 0: no weights."""

    def update(
        self,
        rows: int,
        count: int,
        gradients: int,
        optimizer: int,
        factors: tuple[float, float, float, float, float],
        step: int,
        timeout: float,
    ) -> _RowsFailure:
        """Make one optimizer step on distinct rows; optimizer 0 is SGD, 1 Adagrad, 2 Adam.

        `factors` are lr, lr_decay, eps and the two betas. `step` is the number of the step; 0 for
        the next one.
        """

def segment_bytes(ranks: int) -> int:
    """Return the size of the segment of a group; pages are allocated when first used."""

class Fingerprint:
    """The operation that a rank was in, as it published it."""

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
    """The reason for the failure of an operation.

    `peer` is the rank that the failure is about, and `reporter` the rank that detected it.
    """

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
    """A send or recv under way."""

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
    def create(ranks: int, rank: int, nonce: int, entry: int = 0) -> Group:
        """Create the segment. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, ranks: int, rank: int, nonce: int, entry: int = 0) -> Group:
        """Open the segment of another process. Raises OSError (EPROTO: it is another segment)."""

    @property
    def descriptor(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def outstanding(self) -> int:
        """The number of messages posted and not done."""

    @property
    def unexpected_peak(self) -> int:
        """The peak number of bytes that unexpected messages took in private memory."""

    def set_tree(self, parents: list[int], caches: list[int]) -> None:
        """Set the tree over which the ranks meet, before the first operation; [] is a flat group.

        Args:
            parents: The parent of each rank, a lower rank; -1 for rank 0. Else ValueError.
            caches: The first rank of each cache, if large data are to be reduced over them; or [].
                They ascend from 0. Else ValueError.
        """

    @property
    def has_tree(self) -> bool: ...
    @property
    def caches(self) -> list[int]:
        """The first rank of each cache over which large data are reduced."""

    def absent_ranks(self) -> list[int]:
        """Return the ranks that have not joined yet."""

    def connect(self) -> Status | None:
        """Open the processes of all peers, which must have joined, to detect their end."""

    def pid(self, rank: int) -> int: ...
    def wait_status(self, rank: int) -> int | None:
        """Return the wait status of a rank's process (see os.waitpid); None if it is unknown."""

    def ranks_behind(self, rank: int) -> list[int]:
        """Return the ranks that are behind `rank` in the group's collectives."""

    def is_awaited(self) -> bool:
        """Return whether all other ranks have entered a collective that this rank has not."""

    def failure(self) -> Status | None:
        """Return the failure that broke the group; None if it is intact."""

    def abort(self, reason: str) -> Status | None:
        """Break the group and wake all its ranks."""

    def abort_deadlock(self, peer: int, reason: str) -> Status | None:
        """Break the group because its ranks wait for each other in several groups."""

    def fail(self, wake: bool, reason: str = "") -> None:
        """Announce that an exception ends this rank: its peers treat it as lost from now on.

        `reason` goes to the flight recorder, unless the group is broken.
        """

    def has_gone(self, rank: int) -> bool:
        """Return whether a rank has left, or is dead or dying, even if the group is broken."""

    def begin_leaving(self) -> None:
        """Announce that this rank posts no more operations; those that it has posted go on."""

    def posts_no_more(self, rank: int) -> bool:
        """Return whether a rank is leaving, has left, or is dead or dying."""

    def decide(self, number: int, rank: int, wanted: str) -> str:
        """Decide on a rank in a round of the agreement on the ranks that go on.

        Args:
            number: The number of the round, from 0.
            rank: The rank.
            wanted: "joined" or "stranded", by the rank itself, or "excluded".

        Returns:
            The decision, which is an earlier one if there was one.

        Raises:
            OSError: There is no memory for the round.
            ValueError: There is no such round, rank or decision.
        """

    def decision(self, number: int, rank: int) -> str | None:
        """Return the decision on a rank, or None.

        This rank has made its own decision in this round or in the one before.
        """

    def publish_successor(self, number: int, descriptor: int, nonce: int) -> None:
        """Publish the segment that the members of a round enter; the lowest one does it, once."""

    def successor(self, number: int) -> tuple[int, int, int] | None:
        """Return pid, descriptor and nonce of that segment; None if it is not published."""

    def is_failing(self, rank: int) -> bool:
        """Return whether a rank has announced that."""

    @property
    def identity(self) -> int:
        """The identity of this group in flight recorders."""

    def flight_recorder(self, rank: int, history: int) -> dict[str, Any] | None:
        """Read a rank's flight recorder like `read_flight_recorder`; None if it is unreadable."""

    def set_global_ranks(self, global_ranks: _Ints, identity: int) -> None:
        """Set the ranks and the identity that flight recorders show, if the group spans hosts."""

    def begin_composite(
        self, kind: str, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> Status | None:
        """Enter a collective that is composed of others, up to `end_composite`.

        The others have no number and no record of their own. No other thread may run operations.
        """

    def end_composite(self, outcome: str) -> None: ...
    def begin_composite_wait(self, rank: int) -> None:
        """Record that this rank waits for a rank of another host, by its global rank."""

    def end_composite_wait(self, rank: int, seconds: float) -> None: ...
    def set_composite_progress(self, percent: int) -> None:
        """Record how much of the composite operation is done."""

    def close(self) -> None:
        """Leave the group, and unmap the segment once calls in other threads have returned."""

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
        self, input: int, outputs: _Ints, count: int, dtype: int, root: int, timeout: float
    ) -> Status | None: ...
    def scatter(
        self, inputs: _Ints, output: int, count: int, dtype: int, root: int, timeout: float
    ) -> Status | None: ...
    def all_gather(
        self, input: int, outputs: _Ints, count: int, dtype: int, timeout: float
    ) -> Status | None: ...
    def reduce_scatter(
        self, inputs: _Ints, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Status | None: ...
    def all_gather_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Status | None:
        """Like `all_gather`, into one tensor that holds a part of `count` elements per rank."""

    def reduce_scatter_single(
        self, input: int, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Status | None: ...
    def all_to_all_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Status | None: ...
    def all_to_all(
        self,
        inputs: _Ints,
        input_counts: _Ints,
        outputs: _Ints,
        output_counts: _Ints,
        dtype: int,
        timeout: float,
    ) -> Status | None:
        """Exchange parts; `inputs` and `outputs` are addresses, and counts are per rank."""

    def send(
        self, data: int, count: int, dtype: int, destination: int, tag: int, timeout: float
    ) -> Status | None: ...
    def recv(
        self, data: int, count: int, dtype: int, source: int, tag: int, timeout: float
    ) -> int | Status:
        """Receive a message, and return the rank of its sender. `source` -1 is any rank."""

    def isend(self, data: int, count: int, dtype: int, destination: int, tag: int) -> Message: ...
    def irecv(self, data: int, count: int, dtype: int, source: int, tag: int) -> Message:
        """Post a recv; `source` -1 is any rank."""

    def wait(self, message: Message, timeout: float) -> Status | None: ...
    def test(self, message: Message) -> bool:
        """Move all bytes that can be moved now, and return whether the message is done."""

    def watch(self, message: Message, timeout: float) -> None:
        """Have `serve` return the message when it is done, within `timeout` seconds."""

    def withdraw(self, message: Message, rank: int) -> bool:
        """Withdraw a recv of any source, since global rank `rank` of another host has answered it.

        Returns whether it was withdrawn, in which case it is done. False means that a message of
        this host has arrived, or has begun to arrive.
        """

    def expect_remote(self, may_come: bool) -> None:
        """Set whether messages of any source may also come from other hosts."""

    def begin_remote(self, kind: str, count: int, dtype: int, rank: int, tag: int) -> Message:
        """Record the begin of a send or recv between hosts, with global rank `rank`; -1: any."""

    def begin_remote_wait(self, message: Message) -> None:
        """Record that a thread waits for it. Does nothing once the group is closed."""

    def end_remote(self, message: Message, outcome: str, rank: int) -> None:
        """Record its outcome. Does nothing the second time, or once the group is closed."""

    def serve(self) -> list[Message]:
        """Progress messages that no thread waits for, until a watched one is done or `stop`."""

    def stop(self) -> None: ...

class OperationState:
    """The state of a membership that direct calls need, see `phalanx.backend.direct_calls`."""

    native: Any
    """The native group, or what takes its place, which has no direct calls."""
    timeout: float
    """The time that an operation may wait for its peers, in seconds."""
    pending: int
    """The number of operations queued in the group's thread."""
    is_direct: bool
    """True if there may be direct calls."""
    def __init__(self, native: Any, timeout: float) -> None: ...

def has_field(objects: Sequence[Any], values: Sequence[int], position: int, size: int) -> bool:
    """Return whether a field lies at a position in the memory of objects.

    Args:
        objects: Objects of one class bound by pybind11.
        values: The value of the field in each object.
        position: The position of the field in bytes.
        size: The size of the field in bytes, 1 or 8.
    """

def set_tensor_api(table: Any, types: tuple[type, type], is_grad_enabled: Any) -> bool:
    """Set torch's table of C functions, and the classes whose instances it is used for.

    Returns False if the table has another version of DLPack.
    """

def set_tensor_layout(
    layout: dict[str, int],
    plain: list[Any],
    negative: list[Any],
    conjugate: list[Any],
    graded: list[Any],
    changed: list[Any],
) -> bool:
    """Set the layout of tensors in memory; return whether they have it.

    Args:
        layout: One of `phalanx.torch_layouts.TENSORS`.
        plain: Ordinary views; the first three lists have tensors that differ in their bits only.
        negative: Negative views.
        conjugate: Conjugate views.
        graded: Tensors that require gradients.
        changed: Tensors without gradients, with many different versions.
    """

def set_direct_call_environment(
    observer_flags: list[tuple[Any, str]],
    observers: list[Callable[[], Any]],
    ops: list[int],
    done: Any,
    blocking: list[Any],
    check_unexpected: Callable[[Group], None],
    fail_collective: Callable[..., Any],
    fail_message: Callable[..., Any],
) -> None:
    """Set what direct calls use of Python.

    Args:
        observer_flags: Modules and names whose values are False while nothing observes operations
            in any thread.
        observers: Functions whose result is false if nothing observes operations in this thread.
        ops: The core's code by torch's number of an operator; -1 for none.
        done: The result of a direct call.
        blocking: The code objects of functions that wait for the message that they post.
        check_unexpected: Called after a recv once unexpected messages have taken 1 MiB.
        fail_collective: Raises the error of a collective.
        fail_message: Raises the error of a message.
    """

def install_direct_calls(
    group_class: type, layouts: dict[str, tuple[type, int, int, int, int]]
) -> None:
    """Replace the methods of a class of groups by direct ones, which call the replaced ones.

    `layouts` has, by the name of an operation, the class of its options and the positions of their
    fields. A collective without them keeps its general method.
    """

def make_operation_class(base: type[PreparedOperation]) -> None:
    """Create the native class of prepared operations, once. `base` has its interface."""

def prepare(
    plain: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    tensors: tuple[Any, ...],
    site: int,
) -> PreparedOperation | tuple[Callable[..., Any], list[Any], dict[str, Any]] | None:
    """Call a function of `torch.distributed` so that it prepares its operation.

    Args:
        plain: The general ways of the operation.
        function: The function.
        arguments: Its arguments.
        options: Its arguments by name.
        tensors: The tensors that must not change.
        site: The call site of the operation's runs.

    Returns:
        The operation. If it cannot be prepared, the call of a general method of the group: method,
        arguments, and those by name. None if the function has called no method of a group.
    """

def wrap_plain(plain: Any) -> PreparedOperation:
    """Return an operation whose runs call `plain`."""

def make_plan(
    plain: Any,
    group: Any,
    membership: OperationState,
    ranks: int,
    operations: list[PreparedOperation],
    tensors: tuple[Any, ...],
    site: int,
) -> tuple[PreparedOperation, list[int]]:
    """Combine operations in one.

    Args:
        plain: The general ways of the plan.
        group: The group of all operations.
        membership: Its state.
        ranks: The size of the group.
        operations: The operations, all native.
        tensors: The tensors that must not change.
        site: The call site of the plan's runs.

    Returns:
        The plan, and the number of operations in each of its steps.
    """
