"""The times of exchanges over a slow link, by the method of training."""

from __future__ import annotations

SLOW = 250e6
"""The bandwidth of a link in bytes per second below which methods differ much."""
EVERY = 128
"""The number of steps between two exchanges of DiLoCo, as in examples/train_gpt.py."""
FLOAT32, INT8 = 4.0, 1 + 4 / 256
"""Bytes per element; int8 has a scale of 4 bytes for each block of 256 (quantization.h)."""


def elements_sent(hosts: int) -> float:
    """Return how many elements each host sends in an all-reduce, for each element of the tensor.

    Whatever the number of its ranks (Patarasuk and Yuan 2009).
    """
    return 2 * (hosts - 1) / hosts


def seconds_per_step(parameters: float, hosts: int, bandwidth: float) -> dict[str, float]:
    """Return the time of the exchange of a step by method, if nothing but the link limits it.

    Synchronous methods make an all-reduce of the gradients, DiLoCo one in `EVERY` steps.

    Args:
        parameters: The number of parameters.
        hosts: The number of hosts.
        bandwidth: The bandwidth of the slowest link in bytes per second.
    """
    elements = elements_sent(hosts) * parameters
    return {
        "float32": elements * FLOAT32 / bandwidth,
        "int8": elements * INT8 / bandwidth,
        "diloco": elements * INT8 / bandwidth / EVERY,
    }


def format_seconds(value: float) -> str:
    """Return a time with a unit in which it has few digits."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
