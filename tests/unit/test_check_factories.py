"""tools/check_factories.py: tensors on the user's default device or of its dtype are found."""

from __future__ import annotations

import pytest

from tools.check_factories import find_defaults, main

REJECTED = {
    "torch.empty(2)": "device and dtype",
    "torch.zeros(2, dtype=torch.int64)": "device",
    "torch.full((2,), 1.0, device='cpu')": "dtype",
    "torch.tensor([1])": "device",
    "[torch.arange(each) for each in counts]": "device",
}
ACCEPTED = [
    "torch.empty(2, dtype=dtype, device=tensor.device)",
    "torch.tensor([1], device='cpu')",
    "torch.zeros(2, **options)",
    "tensor.new_empty(2)",
    "torch.empty_like(tensor)",
    "np.empty(2)",
]


@pytest.mark.parametrize(("source", "missing"), REJECTED.items())
def test_a_default_is_found(source: str, missing: str) -> None:
    assert list(find_defaults(f"\n{source}\n")) == [(2, missing)]


@pytest.mark.parametrize("source", ACCEPTED)
def test_what_is_given_is_accepted(source: str) -> None:
    assert list(find_defaults(source)) == []


def test_the_package_depends_on_no_default() -> None:
    assert main() == 0
