"""Data parallelism on plain `torch.distributed`: runs on any backend.

`gradients` averages the gradients of all ranks after a backward pass: synchronous SGD in one call.
"""

from phalanx.parallel.gradients import average_gradients, average_gradients_per_parameter

__all__ = ["average_gradients", "average_gradients_per_parameter"]
