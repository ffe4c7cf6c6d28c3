"""`phalanx.launch`: run a function on several ranks of this machine and return their results."""

import linecache
import operator
import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import cloudpickle

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.rank_environment import rank_defaults
from phalanx.launcher.rank_processes import RankProcesses
from phalanx.launcher.requirements import check_host
from phalanx.launcher.root_cause import Failure, find_root_cause
from phalanx.launcher.store import HOST, host_store
from phalanx.launcher.worker import InterpreterState, RankOutcome
from phalanx.observe.launcher_log_writer import LauncherLogWriter

__all__ = ["launch"]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = False,
) -> list[T]:
    """Run `fn(*args, **kwargs)` in `nprocs` new processes on this machine; return all results.

    Each process is one rank with the environment of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `MASTER_ADDR`, ...), so `phalanx.init()` or `torch.distributed.init_process_group(backend)` in
    `fn` forms their group. The store for the rendezvous listens on this machine's loopback
    interface, on a free port. The function is pickled by value: it may be defined in a notebook, a
    REPL or a script, which needs no `if __name__ == "__main__"` and is not run again. Each rank
    imports functions of importable modules.

    Blocks until all ranks have ended. Their output appears on this process's `sys.stdout` and
    `sys.stderr`. When a rank fails, the others are stopped: SIGTERM, and SIGKILL 5 seconds later.
    However this call ends, no process is left, even after Ctrl-C or if this process is killed. (The
    kernel ensures it; it watches the calling thread.)

    Args:
        fn: The function for each rank. The function and its arguments must be picklable by
            cloudpickle. So must its result, which is copied to this process.
        nprocs: The number of ranks, at least 1.
        args: The positional arguments, the same for every rank. `RANK` in the environment, or
            `torch.distributed.get_rank()`, distinguishes ranks.
        kwargs: The keyword arguments, the same for every rank.
        timeout: Seconds after which the ranks are stopped and LaunchError is raised; None for no
            limit.
        env: Environment variables for the ranks, in addition to this process's own.
            `OMP_NUM_THREADS` is max(1, usable cores // nprocs) unless either sets it.
        prefix: True to begin every line that a rank prints with `[rank N] `.

    Returns:
        The results of `fn` in rank order.

    Raises:
        UsageError: An argument is invalid; no process was started.
        LaunchError: This host cannot start so many ranks, a rank failed, or the timeout expired.
            After a failure, the message names the rank with the first error and contains its
            traceback. An error that is a consequence of another rank's, such as PeerLost, counts
            as first only if there is no other. `__cause__` is the original exception if it could
            be pickled.

    Example:
        >>> def area(side):
        ...     return int(os.environ["RANK"]) * side
        >>> phalanx.launch(area, 2, (21,))
        [0, 21]
    """
    nprocs = _check_arguments(fn, nprocs, args, kwargs, timeout, env)
    check_host(nprocs)
    deadline = None if timeout is None else time.monotonic() + timeout
    with LauncherLogWriter(nprocs) as launcher_log:
        payload = _write_payload(fn, tuple(args), dict(kwargs or {}))
        with RankProcesses(payload, launcher_log, prefix=prefix) as ranks:
            store, run_id = host_store(), uuid.uuid4().hex
            for rank in range(nprocs):
                environ = _rank_environment(
                    rank, nprocs, store.port, run_id, launcher_log, env or {}
                )
                _start_rank(ranks, environ)
            has_finished = ranks.wait(deadline)
        if failures := [failure for failure in ranks.failures if not failure.stopped]:
            _raise_failure(find_root_cause(failures), ranks, launcher_log)
        if not has_finished:
            raise LaunchError(
                f"timeout: these ranks were still running after {timeout} s and were stopped: "
                f"{_format_ranks(ranks.stopped)}{_explain_hint(launcher_log, 1)}"
            )
    return [_load_result(rank, outcome) for rank, outcome in enumerate(ranks.outcomes)]


def _check_arguments(
    fn: object, nprocs: object, args: object, kwargs: object, timeout: object, env: object
) -> int:
    if not callable(fn):
        raise UsageError(f"fn is {fn!r}: expected a function; write phalanx.launch(fn, nprocs)")
    try:
        if isinstance(nprocs, bool):
            raise TypeError
        count = operator.index(nprocs)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"nprocs is {nprocs!r}: expected an integer, at least 1") from None
    if count < 1:
        raise UsageError(f"nprocs is {count}: expected at least 1")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(f"args is {args!r}: expected a tuple; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs is {kwargs!r}: expected a dictionary of keyword arguments")
    if timeout is not None and not (
        isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0
    ):
        raise UsageError(f"timeout is {timeout!r}: expected seconds greater than 0, or None")
    _check_env(env)
    return count


def _check_env(env: object) -> None:
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise UsageError(f"env is {env!r}: expected a dictionary of environment variables")
    reserved = {*_rank_variables(0, 1, 1, ""), "PHALANX_JOB", "PHALANX_JOBS_DIR"}
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env has {name!r}: {value!r}; expected strings for both")
        if name in reserved:
            raise UsageError(f"env sets {name}, which phalanx.launch sets for each rank: remove it")


def _write_payload(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Write the interpreter state and the call into a memory file; return its descriptor."""
    try:
        call = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise UsageError(_describe_unpicklable(fn, args, kwargs, error)) from error
    fd = os.memfd_create("phalanx-launch", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", closefd=False) as file:
        pickle.dump(InterpreterState(list(sys.argv), _interactive_sources(fn)), file)
        file.write(call)
    return fd


def _describe_unpicklable(
    fn: object, args: tuple[Any, ...], kwargs: dict[str, Any], error: object
) -> str:
    values = {"fn": fn, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception as reason:  # noqa: BLE001 - the object's own code can raise anything
            return (
                f"{name} can't be pickled and so can't be sent to the ranks ({reason}): create the "
                "objects that it needs (locks, files, sockets, groups) inside the function"
            )
    return f"the call can't be pickled and so can't be sent to the ranks ({error})"


def _interactive_sources(fn: object) -> dict[str, list[str]]:
    name = getattr(getattr(fn, "__code__", None), "co_filename", None)
    if name is None or os.path.exists(name):
        return {}
    lines = linecache.getlines(name)
    return {name: lines} if lines else {}


def _rank_variables(rank: int, nprocs: int, port: int, run_id: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": "",
    }


def _rank_environment(
    rank: int,
    nprocs: int,
    port: int,
    run_id: str,
    launcher_log: LauncherLogWriter,
    env: Mapping[str, str],
) -> dict[str, str]:
    environ = {**os.environ, **env}
    variables = _rank_variables(rank, nprocs, port, run_id)
    return {**environ, **rank_defaults(nprocs, environ), **variables, **launcher_log.environment()}


def _start_rank(ranks: RankProcesses, environ: Mapping[str, str]) -> None:
    try:
        ranks.start(environ)
    except OSError as error:
        raise LaunchError(f"can't start rank {environ['RANK']}: {error}") from error


def _raise_failure(
    cause: Failure, ranks: RankProcesses, launcher_log: LauncherLogWriter
) -> NoReturn:
    outcome = ranks.outcomes[cause.rank]
    if outcome is not None and outcome.value is None:
        parts = [f"rank {cause.rank} (pid {cause.pid}) raised {outcome.summary}"]
        if cause.text.strip() != outcome.summary:
            parts.append(f"On rank {cause.rank}:\n{cause.text.rstrip()}")
    else:
        parts = [cause.headline + (" after it had returned its result" if outcome else "")]
        if cause.text:
            parts.append(f"The end of its stderr:\n{cause.text}")
    later = [f.rank for f in ranks.failures if not f.stopped and f is not cause]
    parts += [f"Failed after it: {_format_ranks(later)}."] if later else []
    parts += [f"Stopped by the launcher: {_format_ranks(ranks.stopped)}."] if ranks.stopped else []
    message = "\n\n".join(parts) + _explain_hint(launcher_log, cause.exit_code)
    raise LaunchError(message) from _load_error(outcome)


def _explain_hint(launcher_log: LauncherLogWriter, code: int) -> str:
    is_kept = launcher_log.finish(code)
    return (
        f"\n\nTo see what the ranks were doing: phalanx explain {launcher_log.name}"
        if is_kept
        else ""
    )


def _load_error(outcome: RankOutcome | None) -> BaseException | None:
    if outcome is None or outcome.error is None:
        return None
    try:
        error = pickle.loads(outcome.error)
    except Exception:  # noqa: BLE001 - the message contains its text anyway
        return None
    return error if isinstance(error, BaseException) else None


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _load_result(rank: int, outcome: RankOutcome | None) -> Any:
    if outcome is None or outcome.value is None:
        raise LaunchError(f"rank {rank} ended without a result")
    try:
        return pickle.loads(outcome.value)
    except Exception as error:
        raise LaunchError(f"rank {rank}'s result can't be unpickled here: {error}") from error
