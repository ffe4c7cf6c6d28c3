"""Defects made by hand all over Phalanx, to measure whether the tests find them.

Each is like a mistake of a programmer. A good suite finds it in one of the test files named.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
RESULT = ROOT / "benchmarks" / "defects.md"

HEAD = """# Defects that the tests find

Defects made by hand all over `src/phalanx`, one at a time (`python -m tools.defects --record`).
Each was looked for in the one to three test files that `tools/defects.py` names for it.
{count} of {total} were found.
"""


@dataclass(frozen=True)
class Defect:
    """A defect: a text of a source file, and its wrong replacement.

    Attributes:
        name: What is wrong.
        file: The path of the file below `src/phalanx`.
        old: A text that occurs exactly once in the file.
        new: Its wrong replacement.
        tests: The paths, below `tests`, of files that should find the defect.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="average-of-integers-rounded-down",
        file="backend/collectives.py",
        old='rounding_mode="trunc"',
        new='rounding_mode="floor"',
        tests=(
            "conformance/test_algorithms.py",
            "conformance/test_reduce_scatter.py",
            "conformance/test_reductions.py",
        ),
    ),
    Defect(
        name="blocking-collective-overtakes-queued-ones",
        file="backend/execution.py",
        old="        if opts.asyncOp or membership.pending:\n",
        new="        if opts.asyncOp:\n",
        tests=("multiprocess/test_backend_works.py", "conformance/test_overlap.py"),
    ),
    Defect(
        name="recv-from-any-rank-loses-its-source",
        file="backend/messages.py",
        old="return _DONE if src >= 0 else FinishedWork([tensor], source)",
        new="return _DONE",
        tests=("conformance/test_messages.py", "multiprocess/test_blocking_messages.py"),
    ),
    Defect(
        name="conjugate-view-sent-as-it-is",
        file="backend/operands.py",
        old="tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():",
        new="tensor.is_contiguous() and not tensor.is_neg():",
        tests=("conformance/test_algorithms.py", "conformance/test_layouts.py"),
    ),
    Defect(
        name="callback-waits-for-its-own-operation-forever",
        file="backend/threads.py",
        old=(
            "        if self._runner is threading.current_thread():\n"
            "            self._run_up_to(number)\n"
        ),
        new="",
        tests=("multiprocess/test_callbacks.py",),
    ),
    Defect(
        name="fraction-of-a-timeout-dropped",
        file="backend/work.py",
        old="return timeout.total_seconds() or default",
        new="return timeout.seconds or default",
        tests=(
            "fault/test_deadlines.py",
            "fault/test_error_attributes.py",
            "multiprocess/test_backend_works.py",
        ),
    ),
    Defect(
        name="own-group-taken-for-another-one",
        file="backend/membership.py",
        old=(
            "return any(each.pending for each in list(_memberships) if each.native is not native)"
        ),
        new="return any(each.pending for each in list(_memberships))",
        tests=("fault/test_deadlocks.py",),
    ),
    Defect(
        name="lost-ranks-numbered-as-in-the-job",
        file="backend/rank_changes.py",
        old="gone = sorted(before.index(each) for each in lost if each in before)",
        new="gone = sorted(each for each in lost if each in before)",
        tests=("fault/test_shrink.py", "fault/test_replace.py", "hosts/test_relay.py"),
    ),
    Defect(
        name="waiting-newcomer-counts-as-settled",
        file="backend/newcomers.py",
        old="settled += number == settled",
        new="settled += 1",
        tests=("fault/test_replace.py", "fault/test_elastic.py"),
    ),
    Defect(
        name="awaited-rank-not-translated-to-its-group",
        file="backend/deadlock_detector.py",
        old="return read_rank(groups[wait.identity], wait.peer_in_group, _HISTORY)",
        new="return read_rank(groups[wait.identity], wait.peer, _HISTORY)",
        tests=("fault/test_deadlocks.py",),
    ),
    Defect(
        name="error-names-ranks-of-the-group-not-the-job",
        file="backend/failure.py",
        old='"ranks": [membership.members[rank] for rank in sorted({*ranks})],',
        new='"ranks": sorted({*ranks}),',
        tests=("fault/test_error_attributes.py", "unit/test_failure.py"),
    ),
    Defect(
        name="failed-rank-excluded-from-the-wrong-round",
        file="topology/agreement.py",
        old="self.board.decide(number + 1, self.rank, _EXCLUDED)",
        new="self.board.decide(number, self.rank, _EXCLUDED)",
        tests=("unit/test_agreement.py",),
    ),
    Defect(
        name="chain-of-hosts-runs-backwards",
        file="hierarchical/data_movement.py",
        old="return (layout.host - layout.host_of(root)) % len(layout.hosts)",
        new="return (layout.host_of(root) - layout.host) % len(layout.hosts)",
        tests=("hosts/test_operations.py", "hosts/test_edges.py"),
    ),
    Defect(
        name="end-of-a-rank-that-aborted-not-reported",
        file="transports/relay/server.py",
        old="        members += self._aborted.get(process, ())\n",
        new="",
        tests=("hosts/test_relay.py",),
    ),
    Defect(
        name="abort-after-a-lost-peer-taken-for-the-cause",
        file="launcher/failures.py",
        old="if self.code < 0 and self.code != -signal.SIGABRT:",
        new="if self.code < 0:",
        tests=("unit/test_failure.py", "multiprocess/test_run.py"),
    ),
    Defect(
        name="stop-time-of-the-previous-attempt-kept",
        file="launcher/elastic_agent.py",
        old=('        self._stop_time = float("inf")\n        self._unprompted = set()\n'),
        new="        self._unprompted = set()\n",
        tests=("multiprocess/test_restarts.py", "multiprocess/test_job_life.py"),
    ),
    Defect(
        name="own-environment-overrides-env",
        file="launcher/launch.py",
        old="environ = {**os.environ, **(env or {})}",
        new="environ = {**(env or {}), **os.environ}",
        tests=("multiprocess/test_launch.py", "multiprocess/test_rank_defaults.py"),
    ),
    Defect(
        name="failure-of-an-earlier-attempt-counts",
        file="recorder/recorder_file.py",
        old=(
            "        _ended_well(recorder) for recorder in recorders if "
            'recorder["attempt"] == attempt\n'
        ),
        new=(
            "        _ended_well(recorder) for recorder in recorders if "
            'recorder["attempt"] <= attempt\n'
        ),
        tests=("unit/test_job_reader.py", "unit/test_recorder.py"),
    ),
    Defect(
        name="arrived-ranks-count-as-late",
        file="diagnosis/wait_for_graph.py",
        old="self.count_collectives(number, group) < operation.sequence:",
        new="self.count_collectives(number, group) <= operation.sequence:",
        tests=("unit/test_diagnosis_scenarios.py", "unit/test_diagnosis.py"),
    ),
    Defect(
        name="straggler-may-wait-as-long-itself",
        file="diagnosis/watch.py",
        old="excess = mean - (row.waiting or 0.0)",
        new="excess = mean",
        tests=("unit/test_watch.py",),
    ),
    Defect(
        name="value-freed-while-others-refer-to-it",
        file="rpc/reference_counting.py",
        old="        elif not value.holders and (value.is_created or not value.is_awaited):\n",
        new="        else:\n",
        tests=("multiprocess/test_rpc_references.py",),
    ),
    Defect(
        name="leader-not-woken-for-an-earlier-deadline",
        file="rpc/event_loop.py",
        old="if is_first and not self.threads.is_leader:",
        new="if is_first and self.threads.is_leader:",
        tests=(
            "unit/test_rpc_event_loop.py",
            "multiprocess/test_rpc_failures.py",
            "multiprocess/test_rpc_calls.py",
        ),
    ),
    Defect(
        name="another-key-accepted",
        file="rpc/workers.py",
        old='if origin == "inherited" and own is not None and value == _key_digest(own):',
        new='if origin == "inherited" and own is not None:',
        tests=("multiprocess/test_rpc_authentication.py", "multiprocess/test_rpc_joining.py"),
    ),
    Defect(
        name="first-row-of-a-server-sent-to-the-one-before",
        file="embedding/sharding.py",
        old="torch.bucketize(indices, self._ends, right=True)",
        new="torch.bucketize(indices, self._ends)",
        tests=("unit/test_embedding.py", "multiprocess/test_embedding.py"),
    ),
    Defect(
        name="number-of-steps-not-loaded",
        file="embedding/table.py",
        old='        self._core.step = int(state["step"])\n',
        new="",
        tests=("unit/test_embedding.py",),
    ),
    Defect(
        name="change-of-the-learning-rate-ignored",
        file="parallel/shared_data_parallel/optimizer.py",
        old=(
            '            inner.update({key: group[key] for key in inner if key != "params" '
            "and key in group})\n"
        ),
        new="            inner.update({key: group[key] for key in group if key not in inner})\n",
        tests=(
            "multiprocess/test_data_parallel.py",
            "multiprocess/test_data_parallel_scenarios.py",
        ),
    ),
    Defect(
        name="overlapped-exchange-ends-a-step-late",
        file="parallel/local_sgd/optimizer.py",
        old="if self.completed - fragment.begun_at >= overlap:",
        new="if self.completed - fragment.begun_at > overlap:",
        tests=("multiprocess/test_local_sgd.py", "multiprocess/test_trainer_local_sgd.py"),
    ),
    Defect(
        name="running-variance-is-biased",
        file="parallel/sync_batch_norm.py",
        old="unbiased = variance * (count / (count - 1))",
        new="unbiased = variance",
        tests=("multiprocess/test_sync_batch_norm.py",),
    ),
    Defect(
        name="weight-ignores-the-resumed-position",
        file="data/samplers.py",
        old=(
            "size = min(self.global_batch, self.samples - self._start - step * self.global_batch)"
        ),
        new="size = min(self.global_batch, self.samples - step * self.global_batch)",
        tests=("unit/test_resumable.py", "unit/test_data.py"),
    ),
    Defect(
        name="resumed-sampler-keeps-the-first-order",
        file="data/samplers.py",
        old=("        self._set_epoch(epoch)\n        self._position = self._start = position\n"),
        new="        self.epoch = epoch\n        self._position = self._start = position\n",
        tests=("unit/test_resumable.py", "multiprocess/test_uneven.py"),
    ),
    Defect(
        name="newcomer-counts-its-steps-from-zero",
        file="train/elastic.py",
        old="self.completed, states = state",
        new="_, states = state",
        tests=("fault/test_elastic.py",),
    ),
    Defect(
        name="schedule-advances-in-a-skipped-step",
        file="train/trainer.py",
        old="        elif self._scheduler is not None:\n",
        new="        if self._scheduler is not None:\n",
        tests=("unit/test_mixed_precision.py",),
    ),
    Defect(
        name="damaged-checkpoints-count-as-kept",
        file="checkpoints/directory.py",
        old=(
            "        ranked = [name for name in names if name not in self.unusable_names]\n"
            "        ranked += [name for name in names if name in self.unusable_names]\n"
        ),
        new="        ranked = list(names)\n",
        tests=("unit/test_checkpoint_trouble.py", "unit/test_checkpoints.py"),
    ),
    Defect(
        name="memory-of-the-child-not-tested",
        file="doctor/kernel.py",
        old='if child_result == own_result == "yes":',
        new='if child_result == "yes":',
        tests=("unit/test_doctor.py", "multiprocess/test_doctor.py"),
    ),
    Defect(
        name="finished-jobs-not-removed",
        file="cli/jobs.py",
        old='if job.state != "running")]',
        new='if job.state == "failed")]',
        tests=("unit/test_commands.py", "multiprocess/test_launched_jobs.py"),
    ),
    Defect(
        name="zombie-counts-as-alive",
        file="system/processes.py",
        old='if fields is None or fields[StatField.STATE] in (b"Z", b"X"):',
        new="if fields is None:",
        tests=("unit/test_newcomers.py", "unit/test_system.py", "fault/test_replace_kills.py"),
    ),
    Defect(
        name="started-plan-blocks",
        file="backend/prepared.py",
        old="return self._execute(is_async=True)",
        new="return self._execute(is_async=False)",
        tests=("multiprocess/test_prepared.py",),
    ),
    Defect(
        name="one-rank-too-many-counted-as-left",
        file="launcher/rank_replacement.py",
        old="number = len(worker_group.workers) - len(self._given_up) - 1",
        new="number = len(worker_group.workers) - len(self._given_up)",
        tests=("multiprocess/test_elastic_jobs.py",),
    ),
    Defect(
        name="carriage-return-ends-no-line",
        file="launcher/output_forwarder.py",
        old='None if text.endswith((b"\\n", b"\\r")) else owner',
        new='None if text.endswith(b"\\n") else owner',
        tests=("multiprocess/test_launch.py", "multiprocess/test_run.py"),
    ),
    Defect(
        name="common-call-named-in-place-of-the-rare-one",
        file="diagnosis/kinds/mismatches.py",
        old="few = min(len(ranks) for ranks in callers.values())",
        new="few = max(len(ranks) for ranks in callers.values())",
        tests=("unit/test_diagnosis.py", "unit/test_diagnosis_scenarios.py"),
    ),
    Defect(
        name="optimizer-updates-memory-that-was-replaced",
        file="rpc/optimizer.py",
        old=(
            "                if not alias.is_set_to(parameter):  # its `data` was set to "
            "another tensor\n"
            "                    alias.data = parameter.data\n"
        ),
        new="",
        tests=("multiprocess/test_rpc_optimizer.py",),
    ),
    Defect(
        name="training-ends-with-the-least-number-of-ranks",
        file="train/recovery.py",
        old="if change.world_size < self._min_ranks and error is not None:",
        new="if change.world_size <= self._min_ranks and error is not None:",
        tests=("fault/test_elastic.py",),
    ),
    Defect(
        name="one-rank-writes-all-shards",
        file="checkpoints/sharding.py",
        old="        bytes_by_rank[writer] += length\n",
        new="",
        tests=("unit/test_sharding.py", "multiprocess/test_checkpoints.py"),
    ),
)


def find(defect: Defect) -> tuple[str, float]:
    """Make a defect in the source tree; return the first test that finds it, and the seconds."""
    path = SOURCE / defect.file
    original = path.read_text()
    count = original.count(defect.old)
    if count != 1:
        raise SystemExit(f"{defect.name}: {defect.file} has the text {count} times, expected once")
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-x", "-q", "--timeout=60"]
    command += [f"tests/{each}" for each in defect.tests]
    start = time.monotonic()
    try:
        path.write_text(original.replace(defect.old, defect.new))
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        path.write_text(original)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if found is None and ended.returncode:
        return f"exit code {ended.returncode}", time.monotonic() - start
    return found[1] if found else "", time.monotonic() - start


def main() -> int:
    """Make the defects that the command line names, one after another, and record the findings."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="words in names of defects; all by default")
    parser.add_argument("--record", action="store_true", help="write benchmarks/defects.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the defect is taken out again
    if subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT, check=False
    ).returncode:
        raise SystemExit("src has changes that are not committed: commit them first")
    chosen = [
        each
        for each in DEFECTS
        if not arguments.names or any(word in each.name for word in arguments.names)
    ]
    rows = []
    for defect in chosen:
        found, seconds = find(defect)
        print(f"{defect.name}: {found or 'NOT FOUND'} ({seconds:.0f} s)", flush=True)
        rows.append(
            f"| {defect.name} | `{defect.file}` | {f'`{found}`' if found else '**nothing**'} |"
        )
    count = sum("**nothing**" not in row for row in rows)
    print(f"{count} of {len(rows)} found")
    if arguments.record:
        head = ["| defect | file | found by |", "| --- | --- | --- |"]
        RESULT.write_text(
            "\n".join([HEAD.format(count=count, total=len(rows)), *head, *rows]) + "\n"
        )
    return int(count < len(rows))


if __name__ == "__main__":
    sys.exit(main())
