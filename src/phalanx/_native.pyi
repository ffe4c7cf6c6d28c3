"""The native core: messages between the ranks of a group on one host.

Addresses are those of contiguous tensors in host memory (`Tensor.data_ptr()`) that live until the
operation ends; counts are in elements; `dtype` and `op` are numbers out of `DTYPES` and
`REDUCE_OPS`; timeouts are in seconds. Operations block without the GIL and return None, or a
`Status` that says why the group is broken. Nothing is validated here: `phalanx.backend` does that.
"""

from collections.abc import Callable, Sequence
from typing import Any

_Ints = Sequence[int]

DTYPES: dict[str, int]
REDUCE_OPS: dict[str, int]
LAYOUT_VERSION: int
MAX_RANKS: int
INLINE_BYTES: int
CHUNK_BYTES: int
RING_BYTES: int
PAGE_BYTES: int

def supports(dtype: int, op: int) -> bool:
    """Whether a reduction operator has a meaning for a dtype."""

def reduce(output: int, sources: _Ints, count: int, dtype: int, op: int, divisor: float) -> None:
    """Combine buffers, in this order, into `output`, maybe one of them; `divisor` is for "avg"."""

def overlap(
    inputs: _Ints, input_counts: _Ints, outputs: _Ints, output_counts: _Ints, dtype: int
) -> bool:
    """Whether an input shares memory with an output. Outputs must not overlap one another."""

def misplaced(part: int, parts: _Ints, count: int, dtype: int, rank: int) -> bool:
    """Whether a part of `count` elements shares memory with one that is not exactly this rank's."""

def instruction_set() -> str:
    """What the reduction kernels run on: "baseline", "avx2" or "avx512"."""

def read_flight_recorder(data: bytes, history: int) -> dict[str, Any]:
    """What a flight recorder's file holds: all of it comes checked, in texts and numbers.

    Keys: pid, rank, world_size, attempt, host, job, clock, opened, ending, last_words, ended, note,
    operations (how many have begun), main_waits (the number of the operation that the main thread
    waits for while a group's thread does it; 0: none), groups (list of dicts with the fields of
    `phalanx.observe.model.Group`; members as the text "0-3,6"), open and done (lists of dicts with
    the fields of `phalanx.observe.model.Operation`; done: the newest `history` of them, oldest
    first), reports (list of (time, step, loss)), torn (how many records were being written just
    then).

    Raises ValueError: no flight recorder, one of another layout version, or a damaged one; says which.
    """

def flight_recorder_bytes() -> int:
    """How large the file of a flight recorder is."""

def open_flight_recorder(
    descriptor: int, rank: int, world_size: int, attempt: int, host: str, job: str
) -> None:
    """Make the file behind `descriptor`, of that size, the flight recorder of this process. OSError."""

def has_flight_recorder() -> bool: ...
def forget_flight_recorder() -> None: ...  # in a forked child, whose parent's it is
def main_waits(number: int) -> None:
    """In the main thread: say which operation of a group's thread it waits for; 0: none."""

def report(step: int, loss: float | None, note: str) -> None:
    """Write training progress to the flight recorder; nothing where there is none."""

def note_ending(ending: str, words: str) -> None:
    """Write how this process ends: "left", "exited" or "failed", with the exception in a line."""

class Joining:
    """A group that is being formed, as the flight recorder shows it."""

    def __init__(self, name: str, rank: int, size: int, members: str) -> None: ...
    @property
    def note(self) -> int:
        """For `Group.create` and `Group.open`."""

    def waiting_for(self, rank: int) -> None: ...
    def end(self, outcome: str) -> None:
        """Say how it ended: "ok", "timeout", "interrupted" or "system"; once."""

def set_foreign_code(beginnings: list[str]) -> None:
    """Say how the paths of code begin that is not the user's."""

def call_site() -> int:
    """The number of the place in the user's code that this thread is in; 0 if there is none."""

def call_site_text(number: int) -> str:
    """Its "path:line"; empty for 0."""

def set_caller(site: int) -> None:
    """In a thread that runs operations for others: where its next one comes from."""

def set_watcher(call: Callable[[], bool]) -> None:
    """Have `call` called in a thread that has waited for a second, and then ever more seldom.

    It returns whether it suspects something: then it is called again half a second later.
    """

def usable_cores() -> int:
    """Processors that this process may run on."""

def shared_bytes(size: int) -> Any:
    """Zeroed memory in this process's arena: an array with `__dlpack__`. Raises OSError."""

def shared_bytes_in_use() -> int:
    """Bytes of the arena that are allocated, in whole pages."""

class Commons:
    """Memory that the ranks of a host hold once, and of which each can still change its own.

    What is written to `common` all ranks see. `own` shows the same, until this process writes to
    it: then the page is its own copy, until it is published or dropped. Nothing synchronises here.
    """

    @staticmethod
    def create(size: int) -> Commons:
        """Zeroed memory in whole pages. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, size: int) -> Commons:
        """What another process has made of `size` bytes. Raises OSError (EPROTO: it is another)."""

    @property
    def descriptor(self) -> int: ...
    def close_descriptor(self) -> None:
        """Once all have opened it; the memory stays for as long as somebody has some of it."""

    def common(self, offset: int, size: int) -> Any:
        """A part of the memory: an array of uint8 with `__dlpack__`, a storage of its own."""

    def own(self, offset: int, size: int) -> Any: ...
    def publish(self, offset: int, size: int) -> int:
        """Write the pages of a range that are this process's own to `common`, and drop them.

        Ranges are of whole pages. Returns how many those were.
        """

    def drop(self, offset: int, size: int) -> int:
        """Drop the pages of a range that are this process's own; returns how many those were."""

def add_up_rows(
    batches: Sequence[tuple[int, int, int, int, int, int, int]],
    width: int,
    dtype: int,
    divisor: float,
    share: tuple[int, int],
    room: tuple[int, int],
) -> int:
    """What `phalanx.embedding.gradients.sum_gradients` says, put into `room`; returns how many rows."""

_Trouble = tuple[str, int, int, int] | None

class Rows:
    """Rows of floats in shared memory, and their optimizer's state (parts 1 and on).

    Every process that has it open may read and write at the same time: each row comes whole, with
    its state. Addresses are of contiguous tensors: int64 for `rows` and `offsets`, the table's
    dtype elsewhere; `parts` has one for each part, 0: none. A call waits `patience` seconds for a
    row that another process writes to. It returns None, or why not: ("index", at, value, 0): number
    `at` of the rows is out of range, and nothing was done; ("offset", at, value, 0), likewise;
    ("stuck", at, row, pid): that process has the row; ("full", at, 0, 0): too many write; rows
    before that one were written. `stride`: bytes from one row to the next; `size`: of all of it.
    """

    @staticmethod
    def create(rows: int, width: int, parts: int, dtype: int, nonce: int) -> Rows:
        """Zeros, backed by memory; float32 or float64. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, nonce: int) -> Rows:
        """What another process has made. Raises OSError (EPROTO: it is another)."""

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
        """All rows of a part as they lie there, unsynchronised: uint8 with `__dlpack__`."""

    def gather(self, rows: int, count: int, parts: _Ints, patience: float) -> _Trouble:
        """Copy rows to `parts`."""

    def write(self, rows: int, count: int, parts: _Ints, patience: float) -> _Trouble:
        """Replace rows by what is in `parts`; a part without an address stays."""

    def pool(
        self,
        rows: int,
        count: int,
        offsets: int,
        bags: int,
        mode: int,
        weights: int,
        output: int,
        patience: float,
    ) -> _Trouble:
        """Combine the rows of each bag: mode 0: sum, 1: mean, 2: max; `weights` 0: none."""

    def update(
        self,
        rows: int,
        count: int,
        gradients: int,
        rule: int,
        factors: tuple[float, float, float, float, float],
        number: int,
        patience: float,
    ) -> _Trouble:
        """One step on rows of which none is there twice; rule 0: SGD, 1: Adagrad, 2: Adam.

        `factors`: rate, its decay, epsilon, betas. `number`: which step it is; 0: the next one.
        """

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
    def create(ranks: int, rank: int, nonce: int, note: int = 0) -> Group:
        """Make the segment. Raises OSError."""

    @staticmethod
    def open(pid: int, descriptor: int, ranks: int, rank: int, nonce: int, note: int = 0) -> Group:
        """Open the segment that another process made. Raises OSError (EPROTO: it is another)."""

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

    def awaited(self) -> bool:
        """Whether all other ranks are in a collective to which this one is still to come."""

    def broken(self) -> Status | None: ...
    def abort(self, why: str) -> Status | None:
        """Break the group and wake all its ranks."""

    def abort_ring(self, peer: int, why: str) -> Status | None:
        """Break the group because its ranks wait for each other in several groups."""

    def fail(self, wake: bool, why: str = "") -> None:
        """Say that an exception ends this rank's part: for its peers it is lost from now on.

        `why` goes to the flight recorder, unless the group is broken.
        """

    def failing(self, rank: int) -> bool:
        """Whether a rank has said that."""

    @property
    def identity(self) -> int:
        """What flight recorders know this group by."""

    def flight_recorder(self, rank: int, history: int) -> dict[str, Any] | None:
        """A rank's flight recorder as `read_flight_recorder` gives it; None if it can't be read."""

    def set_names(self, names: _Ints, identity: int) -> None:
        """Say what the flight recorder calls this group and its ranks here: it has others elsewhere."""

    def compose(
        self, kind: str, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> Status | None:
        """Begin a collective that is composed of others, up to `compose_end`, with a meeting.

        Those have no number and no record of their own. No other thread may be in operations.
        """

    def compose_end(self, outcome: str) -> None: ...
    def compose_waits(self, rank: int) -> None:
        """While it lasts: show that this rank waits for one of another host, by its name."""

    def compose_waited(self, rank: int, seconds: float) -> None: ...
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
        """As all_gather, to parts of `count` elements, one after another in one tensor."""

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

    def withdraw(self, message: Message, name: int) -> bool:
        """Take back a recv of any source, since one has come from rank `name` of another host.

        Whether it could be: False if a message of this host has come, or begun to. It is done then.
        """

    def expect_foreign(self, may_come: bool) -> None:
        """Say whether messages of any source may come from other hosts too."""

    def begin_foreign(self, kind: str, count: int, dtype: int, name: int, tag: int) -> Message:
        """Show the flight recorder a send or recv that others move, to or from rank `name`; -1: any."""

    def foreign_waits(self, message: Message) -> None:
        """Show that it is waited for; nothing once the group is closed, as the next."""

    def end_foreign(self, message: Message, outcome: str, name: int) -> None:
        """Show how it has ended, to or from rank `name`; the second time does nothing."""

    def serve(self) -> list[Message]:
        """Drive messages that nobody waits for, until one that is watched is done or `stop`."""

    def stop(self) -> None: ...
