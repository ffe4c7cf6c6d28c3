"""The random generators of the ranks: their seeds, and their states for a checkpoint."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError

_log = logging.getLogger("phalanx")


def random_states(group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return the states of the random generators of all ranks, by rank. Collective.

    The generators are those of torch (CPU, and the current CUDA device if CUDA has been used), of
    numpy, and of Python's `random`. `Checkpointer` can save the result,
    which takes about 10 KB per rank.

    Args:
        group: The ranks; the default group if None. Without any process group the result covers
            this process alone.

    Raises:
        UsageError: The global generator of numpy is not its default, the Mersenne Twister.
        torch.distributed.DistBackendError: A rank died or did not join the collective.

    Example:
        >>> state = {"model": model.state_dict(), "random": random_states()}
        >>> path = checkpoints.save(step, state)
    """
    own = _capture()
    if group is None and not dist.is_initialized():
        return [own]
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, own, group=group)
    return states


def restore_random_states(
    states: Sequence[dict[str, Any]], group: dist.ProcessGroup | None = None
) -> bool:
    """Restore the random generators of this rank. Not collective, never blocks.

    If `states` has no entry for this rank (there are more ranks now), the generators of the rank
    stay unchanged and the logger "phalanx" emits a warning. Seed them differently on each rank
    before this call.

    Args:
        states: The result of `random_states`.
        group: As in `random_states`.

    Returns:
        True if there was a state for this rank.

    Raises:
        UsageError: `states` is not a result of `random_states`; nothing is changed.

    Example:
        >>> checkpoint = checkpoints.load()
        >>> restored = restore_random_states(checkpoint.state["random"])
    """
    alone = group is None and not dist.is_initialized()
    rank = 0 if alone else dist.get_rank(group)
    if not all(_is_state(state) for state in states):
        raise UsageError("restore_random_states: expected the list that random_states returned")
    if rank >= len(states):
        _log.warning(
            "rank %d has no random state in this list of %d: its generators are unchanged",
            rank,
            len(states),
        )
        return False
    _restore(states[rank])
    return True


def _capture() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": _capture_numpy(),
        "cuda": None,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _capture_numpy() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise UsageError(
            f"numpy's global generator is {numpy_state['bit_generator']}, expected MT19937: "
            "save the state of your own generator yourself"
        )
    return {
        # int64, because torch supports few operations on uint32.
        "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "position": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }


def _restore(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if (numpy := state["numpy"]) is not None:
        words: Tensor = numpy["words"].cpu()
        key = words.numpy().astype(np.uint32)
        numpy_state = ("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"])
        np.random.set_state(numpy_state)
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _is_state(state: object) -> bool:
    return isinstance(state, dict) and {"python", "torch", "numpy", "cuda"} <= state.keys()


def rank_seeds(seed: int, rank: int, index: int) -> list[int]:
    """Return three numbers below 2^63 that are specific to a rank and an index.

    Args:
        seed: The seed that the user gave.
        rank: A rank.
        index: The number of a step or an epoch.
    """
    words = np.random.SeedSequence([abs(seed), rank, index]).generate_state(3, np.uint64)
    return [int(word) >> 1 for word in words]


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators of Python, NumPy and PyTorch, differently on each rank and step."""
    first, second, third = rank_seeds(seed, rank, step)
    random.seed(first)
    np.random.seed(second % 2**32)
    if _has_accelerator():
        torch.manual_seed(third)
    else:  # it would look for all kinds of devices each time: a tenth of a millisecond or more
        torch.default_generator.manual_seed(third)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
