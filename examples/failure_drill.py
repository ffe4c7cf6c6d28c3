"""Test a training loop against failure: kill a rank at each of its operations, and more.

python examples/failure_drill.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import Drill, Result, delay, kill, skip, stop


def train(steps: int) -> str:
    """What is tested: a loop in which no rank hangs or loses its weight when another one fails."""
    with phalanx.init(timeout=3.0) as session:
        weight = torch.zeros(1)
        for step in range(steps):
            gradient = torch.full((1,), float(session.rank))
            try:
                dist.all_reduce(gradient)
            except phalanx.PhalanxError as error:
                return f"saved {weight.item():g} after {step} steps: {type(error).__name__}"
            weight += gradient
        return f"finished with {weight.item():g}"


def tell(what: str, result: Result) -> None:
    """One line: what happened to whom, and what the others made of it."""
    said = sorted({str(value) for rank, value in result.values.items() if rank != 1})
    print(f"{what}: the others {' or '.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Let ranks fail in a training loop.")
    parser.add_argument("--nproc", type=int, default=3, help="ranks to start (3), at least 2")
    parser.add_argument("--steps", type=int, default=3, help="steps of the loop (3), at least 2")
    options = parser.parse_args()
    if options.nproc < 2 or options.steps < 2:
        parser.error(
            f"--nproc {options.nproc} --steps {options.steps} given, expected at least 2 of each"
        )
    with Drill() as drill:

        def run(*faults):  # type: ignore[no-untyped-def]
            return drill.run(train, options.nproc, (options.steps,), faults=faults)

        calm = run()
        tell("no fault", calm)
        for at, operation in enumerate(calm[1].operations, start=1):
            tell(f"rank 1 killed at {operation} {at}", run(kill(rank=1, at=at)))
        tell("rank 1 leaves out its last", run(skip(rank=1, at=len(calm[1].operations))))
        tell("rank 1 late by 0.3 s", run(delay(rank=1, at=2, seconds=0.3)))
        tell("rank 1 stopped for 0.3 s", run(stop(rank=1, at=2, seconds=0.3)))
        tell("rank 1 stopped for good", run(stop(rank=1, at=2)))


if __name__ == "__main__":
    main()
