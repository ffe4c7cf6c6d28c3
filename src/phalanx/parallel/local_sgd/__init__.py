"""Training with hosts that exchange parameters once in many steps: LocalSGD and DiLoCo.

`optimizer` has the two wrappers of an optimizer, `fragment` the exchange of a part of the
parameters, and `arrivals` the messages by which ranks learn between two exchanges that others have
come to the next one, or are lost.
"""

from phalanx.parallel.local_sgd.optimizer import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
