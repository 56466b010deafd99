"""Cross-entropy in place: the reference against autograd of the plain formula, the kernel against the
reference in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from petune.kernels import reference
from petune.kernels.triton import loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "smoothing": {"smoothing": 0.1},
    "all": {"softcap": 3.0, "smoothing": 0.1},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def operands(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits, some of them large, and labels of which every third but the first is ignored."""
    generator = torch.Generator().manual_seed(rows * 100_003 + columns)
    logits = 3 * torch.randn(rows, columns, generator=generator)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[3::3] = -100
    return logits.to(DEVICE, dtype), labels.to(DEVICE)


def plain(logits: Tensor, labels: Tensor, softcap: float = 0.0, smoothing: float = 0.0) -> Tensor:
    """The losses, by operations that autograd knows."""
    scores = softcap * torch.tanh(logits / softcap) if softcap else logits
    return cross_entropy(scores, labels, reduction="none", label_smoothing=smoothing)


def exact(logits: Tensor, labels: Tensor, setting: str) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, logs and gradient in float64."""
    wide = logits.double()
    losses, logs = reference.cross_entropy_(wide, labels, **SETTINGS[setting])
    return losses, logs, wide


def assert_rounded_once(found: Tensor, expected: Tensor) -> None:
    """Within half a unit of the last place of the dtype, and float32's own error."""
    kind = torch.finfo(found.dtype)
    bound = kind.eps / 2 * expected.abs() + 2**-18 * float(expected.abs().max()) + kind.tiny
    assert bool(((found.double() - expected).abs() <= bound).all())


# ------------------------------------------------------------------ the reference


@each_setting
def test_the_reference_is_the_plain_formula_and_its_gradient(setting: str) -> None:
    logits, labels = operands(9, 31)
    wanted = plain(logits.requires_grad_(), labels, **SETTINGS[setting])
    (grad,) = torch.autograd.grad(wanted.sum(), logits)
    found = logits.detach().clone()
    losses, logs = reference.cross_entropy_(found, labels, **SETTINGS[setting])
    torch.testing.assert_close(losses, wanted.detach())
    torch.testing.assert_close(found, grad)
    capped = SETTINGS[setting].get("softcap")
    scores = capped * torch.tanh(logits.detach() / capped) if capped else logits.detach()
    torch.testing.assert_close(logs, torch.logsumexp(scores, -1).masked_fill(labels < 0, 0))


# ------------------------------------------------------------------ the kernel


@pytest.mark.crossed
@each_setting
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 97), (4, 128), (5, 8_192), (3, 20_001)])
def test_the_kernel_is_the_reference_rounded_once(
    shape: tuple[int, int], dtype: torch.dtype, setting: str
) -> None:
    logits, labels = operands(*shape, dtype)
    losses, logs, grad = exact(logits, labels, setting)
    found = loss.cross_entropy_(logits, labels, **SETTINGS[setting])
    assert [part.dtype for part in found] == [torch.float32] * 2
    torch.testing.assert_close(found[0].double(), losses, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found[1].double(), logs, rtol=1e-5, atol=2e-5)
    assert_rounded_once(logits, grad)


def test_rows_may_lie_apart_and_what_is_between_them_stays() -> None:
    whole, labels = operands(6, 80, torch.bfloat16)
    before, logits = whole.clone(), whole[:, 3:70]
    labels = labels.clamp(max=66)
    _, _, grad = exact(logits, labels, "plain")
    loss.cross_entropy_(logits, labels)
    assert_rounded_once(logits, grad)
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 70:], before[:, 70:])


def test_labels_may_lie_apart() -> None:
    logits, _ = operands(5, 40, torch.float32)
    labels = torch.arange(10, device=DEVICE)[::2]
    losses, _, _ = exact(logits, labels, "plain")
    torch.testing.assert_close(loss.cross_entropy_(logits, labels)[0].double(), losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [reference, loss])
def test_an_ignored_row_counts_nothing_whatever_its_logits(module: Any) -> None:
    logits, labels = operands(5, 60, torch.float32)
    logits[3] = math.nan
    losses, logs = module.cross_entropy_(logits, labels)
    assert labels.tolist()[3] == -100
    assert losses[3] == logs[3] == 0
    assert not logits[3].any()
    assert losses.isfinite().all()
    assert logits.isfinite().all()
    assert logits[4].any()


@pytest.mark.parametrize("module", [reference, loss])
def test_a_class_that_cannot_be_has_no_probability_and_no_gradient(module: Any) -> None:
    logits, labels = operands(2, 9_000, torch.float32)
    logits[:, :8_500] = -math.inf
    labels[:] = 8_700
    wanted = cross_entropy(logits[:, 8_500:], labels - 8_500, reduction="none")
    losses, _ = module.cross_entropy_(logits, labels)
    torch.testing.assert_close(losses, wanted)
    assert not logits[:, :8_500].any()
    torch.testing.assert_close(logits.sum(1), torch.zeros_like(wanted), atol=1e-6, rtol=0)


def test_a_label_beyond_the_vocabulary_is_loud() -> None:
    logits, labels = operands(2, 30, torch.float32)
    labels[1] = 30
    found = loss.cross_entropy_(logits, labels)[0]
    assert found.isnan().tolist() == [False, True]
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="out of bounds"):
            reference.cross_entropy_(logits, labels)


def test_no_rows_are_no_work() -> None:
    losses, logs = loss.cross_entropy_(
        torch.empty(0, 9, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    )
    assert losses.shape == logs.shape == (0,)


def test_offsets_do_not_end_at_two_to_the_31() -> None:
    apart = 2**30
    # of which three pages are touched
    memory = torch.empty(2 * apart + 64, dtype=torch.bfloat16, device=DEVICE)
    logits, labels = memory.as_strided((3, 64), (apart, 1)), torch.tensor([1, 2, 3], device=DEVICE)
    logits.copy_(operands(3, 64)[0])
    _, _, grad = exact(logits, labels, "plain")
    loss.cross_entropy_(logits, labels)
    assert_rounded_once(logits, grad)
