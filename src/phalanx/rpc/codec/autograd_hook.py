"""The hook of autograd in calls.

Every tensor that is sent or received with a request or an answer passes through an `AutogradHook`.
By default tensors only lose their history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AutogradHook", "get_autograd_hook", "set_autograd_hook"]


class AutogradHook(Protocol):
    """A hook that tensors pass through, in the thread that sends or receives them."""

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:
        """Process tensors before they are sent with a request or an answer.

        Args:
            peer: The id of the receiver.
            tensors: All tensors to send.

        Returns:
            The tensors to send in their place, without history, and metadata for the receiver.
        """
        ...

    def cancel(self, metadata: bytes) -> None:
        """Free what is kept for tensors that were to be sent with this metadata and were not."""
        ...

    def receive(self, peer: int, tensors: list[Tensor], metadata: bytes) -> list[Tensor]:
        """Process tensors before they are put into unpickled arguments or results.

        Args:
            peer: The id of the sender.
            tensors: The received tensors.
            metadata: The metadata that `send` returned on the sender.
        """
        ...


class _DetachingHook:
    """The default hook: tensors lose their history."""

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:  # noqa: ARG002
        return [each.detach() if each.requires_grad else each for each in tensors], b""

    def cancel(self, metadata: bytes) -> None:
        pass

    def receive(self, peer: int, tensors: list[Tensor], metadata: bytes) -> list[Tensor]:  # noqa: ARG002
        return tensors


_hooks: list[AutogradHook] = [_DetachingHook()]


def set_autograd_hook(hook: AutogradHook | None) -> None:
    """Set the hook that tensors pass through; with None, they only lose their history."""
    _hooks[0] = _DetachingHook() if hook is None else hook


def get_autograd_hook() -> AutogradHook:
    """Return the hook that tensors pass through."""
    return _hooks[0]
