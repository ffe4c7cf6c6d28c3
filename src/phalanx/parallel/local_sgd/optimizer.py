"""Local SGD and DiLoCo: hosts that exchange parameters once in many steps.

Between two exchanges, each host makes steps of its own optimizer. In an exchange, the ranks average
the differences that these steps have made, and an outer optimizer applies the average to the
parameters that all have in common. With plain averages this is local SGD (Stich, "Local SGD
converges fast and communicates little", 2019), with Nesterov's momentum DiLoCo (Douillard et al.,
"DiLoCo: distributed low-communication training of language models", 2023). An exchange may overlap
with steps, and parts of the parameters may be exchanged in turn (Douillard et al., "Streaming
DiLoCo with overlapping communication", 2025).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import default_pg_timeout

import phalanx
from phalanx.errors import UsageError
from phalanx.parallel.gradients import average_gradients, check_group
from phalanx.parallel.groups import create_group, equalize_group_counts
from phalanx.parallel.local_sgd.arrivals import Arrivals
from phalanx.parallel.local_sgd.fragment import Fragment, Report
from phalanx.system.polling import wait_until
from phalanx.torch_versions import foreach_copy_

_logger = logging.getLogger("phalanx")

OuterOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class LocalSGD(torch.optim.Optimizer):
    """An optimizer whose hosts exchange parameters once in `every` steps (local SGD).

    It wraps an optimizer, which makes the steps. The ranks of a host average their gradients in
    each step. In an exchange, all ranks get the average of their parameters, in float32 (or in
    float64, if the model has such parameters). The ranks of a host have the same parameters at all
    times, those of different hosts after an exchange. All ranks must construct it together, with
    the same model, and get the parameters of rank 0. It blocks until they have, and `step` does in
    an exchange, until all ranks have come to it or the timeout of the group ends.

    Schedulers are made for this optimizer. Buffers, such as BatchNorm's means, are not exchanged.
    All parameters must be dense and on one device.

    Args:
        optimizer: The optimizer of the steps, such as AdamW. Its state stays on each host.
        every: The number of steps between two exchanges.
        compress: The encoding of the exchange between hosts, as in `phalanx.Options`.
        overlap: The number of steps after which the result of an exchange is applied; meanwhile it
            runs in the background. What these steps change is kept. Less than `every`.
        fragments: The number of parts of the parameters, which are exchanged one after the other,
            at equal distances within `every` steps. This spreads the load of the link.
        unit: "host": the ranks of a host make the same steps together. "rank": each rank makes its
            own steps.
        non_finite: What is done if the parameters of a rank are not finite. "raise": all ranks
            raise an error that names it. "exclude": the others continue with their average, and
            give it to that rank, whose optimizer starts anew. Its buffers, such as BatchNorm's
            means, stay as they are.
        average: Whether `step` averages the gradients of the ranks of a host. Pass False if you do
            that yourself, by `average_gradients(model, optimizer.host_group)`, to clip them, or by
            a DistributedDataParallel over that group (not if `elastic`: it would be another one
            after each change).
        early: True if a host begins an exchange, with the steps that it has made so far, as soon as
            it knows that another host has begun it. So the others wait for one step of a slow host,
            rather than for `every`. Not with `fragments`.
        elastic: True for a training that continues when ranks are lost, by `phalanx.train.Elastic`,
            on the default group. Constructing it then does not block, since the loop forms the
            groups.
        group: The group of all ranks; the default group if None.

    Raises:
        UsageError: There is no process group, an argument is invalid, or the arguments or models of
            two ranks differ.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = phalanx.parallel.LocalSGD(optimizer, every=8, compress="int8")
        >>> for inputs, targets in batches:
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(inputs), targets).backward()
        ...     optimizer.step()
        >>> optimizer.synchronize()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        compress: str = "",
        overlap: int = 0,
        fragments: int = 1,
        unit: str = "host",
        non_finite: str = "raise",
        average: bool = True,
        early: bool = False,
        elastic: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._set_up(
            optimizer,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            {
                "every": every,
                "compress": compress,
                "overlap": overlap,
                "fragments": fragments,
                "unit": unit,
                "non_finite": non_finite,
                "average": average,
                "early": early,
                "elastic": elastic,
            },
            group,
        )

    def _set_up(
        self,
        optimizer: torch.optim.Optimizer,
        outer: OuterOptimizer,
        options: dict[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._name = type(self).__name__
        check_group(group, self._name)
        _check_options(self._name, options, group)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        """The optimizer of the steps."""
        self._options = options
        self._parameters = [parameter for each in self.param_groups for parameter in each["params"]]
        self.every: int = options["every"]
        """The largest number of steps between two exchanges."""
        self.average: bool = options["average"]
        """True if `step` averages the gradients of the ranks of a host."""
        self.early: bool = options["early"]
        """True if a host begins an exchange as soon as another one has."""
        self.elastic: bool = options["elastic"]
        """True if an elastic loop forms the groups."""
        self.completed = 0
        """The number of steps so far."""
        self.exchanges = 0
        """The number of exchanges so far, of any fragment."""
        self.has_exchanged = False
        """True if the last step began an exchange, as a step of all ranks did."""
        self.host_group: dist.ProcessGroup | None = None
        """The group of the ranks that make the same steps, even if there is only one; None before
        an elastic loop has formed it."""
        self.hosts: list[list[int]] = []
        """By host, its ranks in the group of all, which make the same steps; with `unit="rank"`,
        lists of one rank."""
        self._is_late = False
        """True if this host has got the state of another one, and made no exchange since."""
        self._outer_group: Any = None
        self._arrivals: Arrivals | None = None
        self._whole: Any = group
        self._rank, self._size, self._host_size = 0, 1, 1
        parts = _split(self._parameters, options["fragments"])
        self._fragments = [
            Fragment(part, number * self.every // len(parts)) for number, part in enumerate(parts)
        ]
        self.outer = outer([fragment.outer for fragment in self._fragments])
        """The outer optimizer, of the flat parameters that all ranks have in common."""
        if not self.elastic:
            self.form()

    def form(self, *, is_whole: bool = True) -> None:
        """Form the groups; before the first step, give all ranks the parameters of one of them.

        Collective. An elastic loop calls it at the start and after each change of the ranks.

        Args:
            is_whole: Whether this rank has the state after the last exchange; at least one has.
        """
        whole: Any = self._whole or dist.group.WORLD
        self._rank, self._size = dist.get_rank(whole), dist.get_world_size(whole)
        made = [self.completed - fragment.since for fragment in self._fragments]
        own = _Member(is_whole, self.completed, made, self._describe())
        members: list[Any] = [None] * self._size
        dist.all_gather_object(members, own, group=whole)
        self._check_equal(members, whole)
        self.host_group, self._outer_group, self.hosts = _create_groups(whole, self._options)
        self._host_size = dist.get_world_size(self.host_group)
        self._arrivals = Arrivals(self._outer_group, self.hosts)
        self._arrivals.listen()
        complete = [each for each in members if each.is_whole]
        source = members.index(complete[0])
        self.completed = max(each.completed for each in complete)
        for number, fragment in enumerate(self._fragments):
            fragment.form(self._size)
            fragment.since = self.completed - max(each.made[number] for each in complete)
            if not self.completed:
                fragment.broadcast(source, self._outer_group)
        self.resume(is_late=False)

    def resume(self, *, is_late: bool) -> None:
        """Continue after a change of the ranks. An elastic loop calls it on all of them.

        Args:
            is_late: Whether this host has got the state of another one. Then it continues from the
                common parameters, and is in step with the others from their next exchange on.
        """
        for fragment in self._fragments:
            if is_late:
                fragment.load()
            fragment.equal_at = None if self.completed else 0
        self._is_late = is_late and not self.early

    def release(self) -> None:
        """Forget the groups and a running exchange.

        An elastic loop calls it after a change of the ranks, before `form`. In between,
        `state_dict` and `load_state_dict` work.
        """
        self.host_group, self._outer_group, self._arrivals = None, None, None
        for fragment in self._fragments:
            fragment.abandon()

    def _describe(self) -> dict[str, Any]:
        """Return what must be the same on all ranks."""
        outer = [
            {key: value for key, value in each.items() if key != "params"}
            for each in self.outer.param_groups
        ]
        shapes = [(tuple(each.shape), str(each.dtype)) for each in self._parameters]
        return {**self._options, "outer optimizer": outer, "parameters": shapes}

    def _check_equal(self, members: Sequence[_Member], whole: dist.ProcessGroup) -> None:
        """Check that all ranks have the same options and models.

        In an elastic training, a rank with others ends, and the rest continues without it.
        """
        reference = next(rank for rank, each in enumerate(members) if each.is_whole)
        expected = members[reference].description
        is_equal = True
        for rank, member in enumerate(members):
            differs = [key for key in expected if member.description[key] != expected[key]]
            if differs and (rank == self._rank or not self.elastic):
                key = differs[0]
                raise UsageError(
                    f"{self._name}: rank {rank} has {key} {_shorten(member.description[key])}, "
                    f"rank {reference} {_shorten(expected[key])}: give all ranks the same"
                )
            is_equal = is_equal and not differs
        if not is_equal:
            dist.barrier(whole)  # fails when that rank ends

    # Schedulers replace `step` of the instance, so it has no state of its own.
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and an exchange if it is time for one.

        Args:
            closure: Computes the loss and the gradients; it is called once.

        Returns:
            What `closure` returned.

        Raises:
            FloatingPointError: In an exchange, the parameters of a rank are not finite.
            torch.distributed.DistBackendError: A rank died or did not take part.
            UsageError: The elastic loop has not begun.
        """
        if self._outer_group is None:
            raise UsageError(
                f"{self._name}(elastic=True): a step came before the training, expected it within "
                "phalanx.train.Elastic"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.completed:
            self._check_unchanged()
        if self.average and self._host_size > 1:
            average_gradients(self._parameters, self.host_group)
        self.inner.step()
        self.completed += 1
        self._exchange_due()
        return loss

    def _check_unchanged(self) -> None:
        if not all(each.is_loaded() for each in self._fragments):
            raise UsageError(
                f"{self._name}: the parameters have changed since it was constructed: load or "
                "initialize them before, so that all ranks begin with the same"
            )

    def _exchange_due(self) -> None:
        """Finish and begin the exchanges for which it is time."""
        self.has_exchanged, overlap = False, self._options["overlap"]
        for fragment in self._fragments:
            if fragment.begun_at is not None:
                fragment.check()
                if self.completed - fragment.begun_at >= overlap:
                    self._finish(fragment)
                    self._listen()
        others_began = self._others_began()
        for fragment in self._fragments:
            is_due = self.completed - fragment.since >= self.every
            if fragment.begun_at is None and (is_due or others_began):
                self._announce()
                self._begin(fragment, keep=overlap > 0)
                if not overlap:
                    self._finish(fragment)
                    self._listen()

    def _others_began(self) -> bool:
        """Return whether this host begins an exchange early; raise if a rank is lost.

        A host that is late takes over the number of steps, so that the exchange is due.
        """
        arrived = None if self._arrivals is None else self._arrivals.find()
        if not (self.early or self._is_late):
            return False
        completed = -1 if arrived is None else arrived
        if self._host_size > 1:
            most = torch.tensor([completed], device="cpu")  # its ranks may have looked in between
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.host_group)
            completed = int(most)
        if self._is_late:
            self.completed = max(self.completed, completed)
            return False
        return completed >= 0

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange all parameters now, for example at the end. All ranks must call it.

        Blocks until the exchange is done; then all ranks have the same parameters.
        """
        # With `early`, hosts have made different numbers of steps, and of exchanges to come.
        is_changed = any(each.equal_at != self.completed for each in self._fragments)
        is_waiting = self.early
        if is_changed and not is_waiting:
            self._exchange_all()
        while is_waiting:
            is_waiting = not all(each.has_ended for each in self._exchange_all())
            if is_waiting:  # if none comes, the exchange times out
                wait_until(self._has_arrived, self._timeout)

    def _has_arrived(self) -> bool:
        return self._arrivals is not None and self._arrivals.find() is not None

    @property
    def _timeout(self) -> float:
        timeout = getattr(self._outer_group, "timeout", None)  # PyTorch's own groups do not tell it
        seconds: float = (timeout or default_pg_timeout).total_seconds()
        return seconds

    def _exchange_all(self) -> list[Report]:
        """Exchange all fragments; return the flags of each rank in the last exchange."""
        for fragment in self._fragments:
            if fragment.begun_at is not None:
                self._finish(fragment)
                self._listen()
        self._announce()  # once: a host that has made the exchange may leave
        for fragment in self._fragments:
            counts = fragment.equal_at != self.completed
            self._begin(fragment, Report(counts, has_ended=True))
        reports = []
        for fragment in self._fragments:
            reports = self._finish(fragment)
            fragment.since += fragment.offset
        self._listen()
        return reports

    def _begin(self, fragment: Fragment, report: Report = Report(), *, keep: bool = False) -> None:  # noqa: B008 - immutable
        self._is_late = False
        fragment.begin(self._rank, self.completed, self._outer_group, report, keep=keep)
        self.has_exchanged = True

    def _finish(self, fragment: Fragment) -> list[Report]:
        reports = fragment.wait(self.completed)
        self._handle_non_finite(reports)
        self.outer.step()
        fragment.apply(replace=not reports[self._rank].counts)
        if not reports[self._rank].is_finite:  # the next step would spread it from the others
            for other in self._fragments:
                other.restore()
        self.exchanges += 1
        return reports

    def _announce(self) -> None:
        if self._arrivals is not None:
            self._arrivals.announce(self.completed)

    def _listen(self) -> None:
        if self._arrivals is not None:
            self._arrivals.listen()

    def _handle_non_finite(self, reports: Sequence[Report]) -> None:
        ranks = [rank for rank, report in enumerate(reports) if not report.is_finite]
        if not ranks:
            return
        names = ", ".join(map(str, ranks))
        text = f"{self._name}: after step {self.completed}, the parameters of rank {names} are"
        if self._options["non_finite"] == "raise" or len(ranks) == self._size:
            raise FloatingPointError(
                f"{text} not finite: lower the learning rate, clip the gradients, or pass "
                'non_finite="exclude" to continue without them'
            )
        _logger.warning("%s not finite: the others continue without them", text)
        if self._rank in ranks:
            self.inner.state.clear()  # moments that are not finite would stay so

    @contextlib.contextmanager
    def common_parameters(self) -> Iterator[None]:
        """Within it, the model has the parameters that all ranks have in common.

        These are the ones of the last exchange, for an evaluation or a checkpoint.
        """
        own = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.load()
        try:
            yield
        finally:
            with torch.no_grad():
                foreach_copy_(self._parameters, own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError: all parameters must be there from the start."""
        if hasattr(self, "_fragments"):
            raise UsageError(
                f"{self._name}: a parameter group was added to it, expected all of them from the "
                "start: add it to the inner optimizer, and construct this one after that"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as `torch.optim.Optimizer.zero_grad`."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: of both optimizers, and the common parameters.

        The state of a rank is not that of ranks on other hosts. If all ranks load the same state,
        they continue from it together.
        """
        return {
            **self.inner.state_dict(),
            _STATE: {
                "outer": self.outer.state_dict(),
                "parameters": [each.outer.detach().clone() for each in self._fragments],
                "completed": self.completed,
                "exchanges": self.exchanges,
                "since": [each.since for each in self._fragments],
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`; all ranks must load the same, and the model before it.

        It may also be the state of the inner optimizer alone, from a training without exchanges.
        """
        plain = {key: value for key, value in state_dict.items() if key != _STATE}
        self.inner.load_state_dict(plain)
        self.param_groups = self.inner.param_groups
        own = state_dict.get(_STATE)
        if own is not None and len(own["since"]) != len(self._fragments):
            raise UsageError(
                f"{self._name}: the state has {len(own['since'])} fragments, this optimizer has "
                f"{len(self._fragments)}: give the same `fragments`"
            )
        for number, fragment in enumerate(self._fragments):
            fragment.reset(None if own is None else own["parameters"][number])
        if own is not None:
            self.outer.load_state_dict(own["outer"])
            self.completed, self.exchanges = own["completed"], own["exchanges"]
            for fragment, since in zip(self._fragments, own["since"], strict=True):
                fragment.since = since
                if fragment.is_loaded():
                    fragment.equal_at = self.completed


class DiLoCo(LocalSGD):
    """Local SGD whose exchanges are steps of an outer optimizer with Nesterov's momentum (DiLoCo).

    The average of the differences that the steps of all ranks have made is the gradient of the
    outer optimizer. With AdamW as the inner optimizer, hundreds of steps between exchanges cost
    language models little loss (Douillard et al. 2023).

    Args:
        optimizer: As in `LocalSGD`.
        every: As in `LocalSGD`; 50 to 500 in the literature.
        lr: The learning rate of the outer optimizer.
        momentum: The momentum of the outer optimizer.
        options: The others of `LocalSGD`: `compress`, `overlap`, `fragments`, `unit`, `non_finite`,
            `average`, `early` and `elastic`.
        group: As in `LocalSGD`.

    Raises:
        UsageError: As in `LocalSGD`.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = phalanx.parallel.DiLoCo(optimizer, every=100, compress="int8", overlap=5)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        unknown = options.keys() - _DEFAULTS.keys()
        if unknown:
            raise UsageError(f"DiLoCo: unknown options {sorted(unknown)}")

        def outer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)

        self._set_up(optimizer, outer, {**_DEFAULTS, **options, "every": every}, group)


_STATE = "local_sgd"
"""The key of the state of the exchanges, beside those of the inner optimizer."""
_DEFAULTS: dict[str, Any] = {
    "compress": "",
    "overlap": 0,
    "fragments": 1,
    "unit": "host",
    "non_finite": "raise",
    "average": True,
    "early": False,
    "elastic": False,
}


class _Member(NamedTuple):
    """A rank that takes part in forming the groups.

    Attributes:
        is_whole: Whether it has the state after the last exchange.
        completed: The number of its steps so far.
        made: By fragment, the number of its steps since the last exchange.
        description: The values that must be the same on all ranks.
    """

    is_whole: bool
    completed: int
    made: list[int]
    description: dict[str, Any]


def _check_options(name: str, options: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    for key, least in (("every", 1), ("overlap", 0), ("fragments", 1)):
        if not (isinstance(options[key], int) and options[key] >= least):
            raise UsageError(f"{name}: {key} is {options[key]!r}, expected an integer from {least}")
    if options["overlap"] >= options["every"]:
        raise UsageError(
            f"{name}: overlap is {options['overlap']}, expected less than every={options['every']}"
        )
    for key, allowed in (("unit", ("host", "rank")), ("non_finite", ("raise", "exclude"))):
        if options[key] not in allowed:
            raise UsageError(f"{name}: {key} is {options[key]!r}, expected one of {allowed}")
    if options["early"] and options["fragments"] > 1:
        raise UsageError(
            f"{name}: early=True with fragments={options['fragments']} given, expected one of them"
        )
    backend = dist.get_backend(group)
    if backend != "phalanx":
        raise UsageError(
            f"{name}: the group uses the backend {backend!r}, expected 'phalanx': form it with "
            'init_process_group("phalanx")'
        )
    if options["elastic"] and group is not None:
        raise UsageError(f"{name}: elastic=True with a group given, expected the default group")


def _create_groups(
    whole: dist.ProcessGroup, options: dict[str, Any]
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup, list[list[int]]]:
    """Create the groups of this rank's host, and of all ranks, for the exchanges.

    The third result is `LocalSGD.hosts`.
    """
    ranks = dist.get_process_group_ranks(whole)
    hosts = phalanx.host_ranks(whole) if options["unit"] == "host" else [[each] for each in ranks]
    own = next(each for each in hosts if dist.get_rank() in each)
    equalize_group_counts(whole)
    host_group = create_group(whole, hosts, own, alone=True)
    compress = options["compress"]
    backend_options = phalanx.Options(compress=compress) if compress else None
    outer_group = create_group(whole, [ranks], ranks, backend_options) or whole
    return host_group, outer_group, [[ranks.index(each) for each in host] for host in hosts]


def _split(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split parameters into at most `count` parts of similar sizes, in their order."""
    total = sum(parameter.numel() for parameter in parameters)
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.numel() / 2
        parts[min(count - 1, int(middle * count / max(total, 1)))].append(parameter)
        before += parameter.numel()
    return [part for part in parts if part]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
