"""The digits that come with the package."""

from __future__ import annotations

import torch
from sklearn import datasets

from phalanx.data import load_digits


def test_digits_are_those_of_scikit_learn() -> None:
    images, labels = load_digits()
    expected = datasets.load_digits()
    assert images.dtype == torch.float32
    assert torch.equal(images * 16, torch.from_numpy(expected.images).float())
    assert torch.equal(labels, torch.from_numpy(expected.target))


def test_each_call_returns_new_tensors() -> None:
    load_digits()[0].zero_()
    assert load_digits()[0].max() == 1
