"""The log specification of the elastic agent: pipes for the ranks' output, read by a forwarder."""

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from phalanx.launcher.output_forwarder import OutputForwarder, Sink

__all__ = ["RankOutput"]

_TAIL_BYTES = 1 << 16


class RankOutput(LogsSpecs):
    """A log specification with a pipe for each stream that a rank would write to the console.

    The agent opens the pipes by their paths in /proc, as if they were log files. Lines therefore
    appear live and whole, each with its rank, and nothing is written to the disk unless the user
    asked for log files, which `log_files` handles.
    """

    def __init__(
        self, forwarder: OutputForwarder, log_files: LogsSpecs | None, shown_ranks: set[int] | None
    ) -> None:
        """Create the specification.

        Args:
            forwarder: The forwarder that reads the pipes.
            log_files: The specification of the log files; None if there are none.
            shown_ranks: The local ranks whose output is shown; None for all.
        """
        super().__init__()
        self.attempt = 0
        """The number of the next start of all ranks, from 0, as the ranks get it."""
        self._forwarder = forwarder
        self._log_files = log_files
        self._shown_ranks = shown_ranks
        self._sinks = Sink("stdout"), Sink("stderr")
        self._writers: list[int] = []
        self._stderr_logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The directory of the log files; the null device if there are none."""
        return self._log_files.root_log_dir if self._log_files else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the pipes for one attempt to run all ranks; called by the agent."""
        for env in envs.values():
            # The agent counts only the failures on this host, which differ between hosts.
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        dest = self._log_files.reify(envs) if self._log_files else self._discard_logs(envs)
        self._stderr_logs.clear()
        for local_rank, env in envs.items():
            prefix = f"[rank {env['RANK']}] "
            for paths, sink in zip((dest.stdouts, dest.stderrs), self._sinks, strict=True):
                is_stderr = paths is dest.stderrs
                if paths[local_rank] not in ("", os.devnull):
                    if is_stderr:
                        self._stderr_logs[local_rank] = paths[local_rank]
                    continue
                visible_sink = sink if self._is_shown(local_rank) else None
                paths[local_rank] = self._create_pipe(
                    local_rank, visible_sink, prefix, keep=is_stderr
                )
        return dest

    def close_write_ends(self) -> None:
        """Close this process's write ends of the pipes, once the ranks have opened theirs."""
        while self._writers:
            os.close(self._writers.pop())

    def tail(self, local_rank: int) -> str:
        """Return the end of a rank's stderr, whether it is shown, hidden or in a log file."""
        if local_rank not in self._stderr_logs:
            return self._forwarder.tail(local_rank)
        return (
            Path(self._stderr_logs[local_rank]).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        )

    def _is_shown(self, local_rank: int) -> bool:
        return self._shown_ranks is None or local_rank in self._shown_ranks

    def _create_pipe(self, local_rank: int, sink: Sink | None, prefix: str, *, keep: bool) -> str:
        reader, writer = os.pipe()
        self._writers.append(writer)
        self._forwarder.add_stream(local_rank, reader, sink, prefix, keep=keep)
        return f"/proc/{os.getpid()}/fd/{writer}"

    @staticmethod
    def _discard_logs(envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, ""),
        )
