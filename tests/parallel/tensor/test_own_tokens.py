"""Where a sequence is cut and nothing trains behind the blocks, a fused head makes the loss of own tokens
alone, and the ranks' losses and gradients are those of one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fuse_stages
from petune.kernels.head import hooks
from petune.methods import tuned_parameters
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import family_of
from petune.models.boundary import shared_tokens_of
from petune.parallel.mesh import Mesh, coordinate, make_mesh
from petune.parallel.placement import parallelize
from petune.parallel.plan import ALONE, ParallelPlan
from petune.parallel.tensor.own_tokens import OwnTokens
from petune.rng.context import Running
from tests.methods.more_models import MODERNBERT
from tests.methods.zoo import SETTINGS, stir, tiny
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.plans import BACKENDS, COMPOSED, settings_of
from tests.pool import run

BLOCKS = MemoryConfig("all", offload="none")


def _rows(one: Case, limit: float) -> dict[str, Any]:
    """The steps of a case, and how many tokens each loss was made of."""
    made: list[int] = []
    plain = hooks.linear_cross_entropy

    def counted(hidden: Tensor, *given: Any, **how: Any) -> Tensor:
        made.append(len(hidden))
        return plain(hidden, *given, **how)

    hooks.linear_cross_entropy = counted  # type: ignore[assignment]  # of a process that ends
    try:
        return {"trace": harness._steps(one, limit), "made": made}
    finally:
        hooks.linear_cross_entropy = plain


def _made(name: str, backend: str, method: str) -> list[int]:
    """Tokens that losses were made of, of both ranks, once the steps are those of one process."""
    one = case(name, method, BACKENDS[backend](name, 2), passes=(4,), steps=1, blocks=BLOCKS)
    expected = oracle(one)
    found = run(2, _rows, one, expected.norms[0] / 2, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    return [sum(rank["made"]) for rank in found]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama-causal", "sp-ulysses"),
        ("t5-seq2seq", "galaxy"),
        pytest.param("llama-causal", "sp-gather", marks=pytest.mark.long),
        pytest.param("bart-seq2seq", "sp-ring", marks=pytest.mark.long),
        pytest.param("bert-mlm", "sp-gather", marks=pytest.mark.long),
    ],
)
def test_each_rank_makes_the_loss_of_its_own_tokens(name: str, backend: str) -> None:
    alone, own = _made(name, "dp", "lora"), _made(name, backend, "lora")
    assert 0 < sum(own) <= sum(alone) and min(own) < sum(own)


def test_a_head_that_trains_makes_the_loss_of_all_tokens_on_every_rank() -> None:
    first, second = _made("llama-causal", "sp-ulysses", "full")
    assert first == second


def test_a_stage_whose_head_is_elsewhere_makes_no_loss() -> None:
    """A head for masked tokens is a part of what an earlier stage lacks whole."""
    plan = COMPOSED["sp x pp"]("bert-mlm")
    groups: Any = dict.fromkeys(("pp", "dp", "tp"), SimpleNamespace())  # nobody is there to talk to
    made = []
    for rank in (0, 2):
        model = tiny("bert-mlm", **dict(settings_of("bert-mlm", plan)))
        tune(model, make_config("lora", SETTINGS["lora"]))
        mesh = Mesh(plan, rank, coordinate(plan, rank), harness.CPU, groups)
        (stage,) = parallelize(model, family_of(model), plan, mesh, tuned_parameters).modules
        made.append([name for name, one in stage.named_modules() if shared_tokens_of(one) is not None])
    assert made == [[], ["cls.predictions.decoder"]]


def _loss_said_twice(one: Case) -> tuple[float, float]:
    """A loss, and that of the same logits behind another call."""
    (model,) = harness.place(one, one.plan).modules
    words, others = torch.arange(3, 12).repeat(2, 1), torch.arange(3, 16).repeat(1, 1)
    first = model(input_ids=words, labels=words, use_cache=False)
    model(input_ids=others, labels=others, use_cache=False)
    labels = F.pad(words[:, 1:], (0, 1), value=-100).flatten()
    return float(first.loss), float(F.cross_entropy(first.logits.flatten(0, 1), labels))


def test_logits_give_the_loss_of_their_own_call_behind_another_one() -> None:
    one = case("llama-causal", "lora", BACKENDS["sp-gather"]("llama-causal", 2), blocks=BLOCKS)
    for first, again in run(2, _loss_said_twice, one):
        assert again == pytest.approx(first, rel=1e-6)


def _sparse_head(plan: ParallelPlan) -> tuple[float, Tensor]:
    """(loss, sums of gradients over the ranks) of a ModernBERT whose head sees tokens with labels alone."""
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(ModernBertConfig(**MODERNBERT, sparse_prediction=True))
    tune(model, make_config("lora", SETTINGS["lora"]))
    stir(model, std=0.1)
    family, mesh = family_of(model), make_mesh(plan, harness.CPU)
    parallelize(model.train(), family, plan, mesh, tuned_parameters)
    assert fuse_stages([model], family, "reference", BLOCKS, device=harness.CPU).blocks
    words = torch.arange(3, 15).view(2, 6)
    loss = model(input_ids=words, labels=words.masked_fill(words % 4 > 0, -100)).loss
    loss.backward()
    found = torch.cat([harness.gradient(value).flatten() for value in tuned_parameters(model).values()])
    if plan.tp > 1:
        dist.all_reduce(found)
    return float(loss), found


def test_a_head_that_sees_some_tokens_makes_the_loss_of_all_of_them_on_every_rank() -> None:
    ((loss, gradients),) = run(1, _sparse_head, ALONE)
    for found, summed in run(2, _sparse_head, BACKENDS["sp-gather"]("modernbert-classify", 2)):
        assert found == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(summed, gradients)


def _unfrozen(plan: ParallelPlan, copied: bool) -> list[Tensor]:
    """The loss, the gradient of a head that trains since the model was placed, and those of the blocks as
    sums over the ranks; then how many tokens the loss is made of, and of that once it is frozen again."""
    one = case("llama-causal", "lora", plan, blocks=BLOCKS)
    (model,) = harness.place(one, plan).modules
    model = copy.deepcopy(model) if copied else model
    head = model.get_output_embeddings().weight.requires_grad_()
    words = torch.arange(3, 15).view(2, 6)
    made = list[int]()
    plain = hooks.linear_cross_entropy
    hooks.linear_cross_entropy = lambda hidden, *given, **how: (
        made.append(len(hidden)) or plain(hidden, *given, **how)
    )
    loss = model(input_ids=words, labels=words, use_cache=False).loss
    loss.backward()
    found = [value.grad.flatten() for value in tuned_parameters(model).values() if value.grad is not None]
    blocks = torch.cat([one for one in found if one.numel() != head.numel()])
    if plan.tp > 1:
        dist.all_reduce(blocks)
    head.requires_grad_(False)
    model(input_ids=words, labels=words, use_cache=False)
    return [loss.detach(), cast("Tensor", head.grad), blocks, torch.tensor(made)]


@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_head_that_trains_later_has_the_gradient_of_all_tokens(copied: bool) -> None:
    (expected,) = run(1, _unfrozen, ALONE, copied)
    every = run(2, _unfrozen, BACKENDS["sp-gather"]("llama-causal", 2), copied)
    for found in every:
        for one, other in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(one, other)
    assert [sum(made) for made in zip(*(found[3].tolist() for found in every), strict=True)] == [24, 12]


def _losses(folded: bool, segments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(own places, the sum over ranks of a number, numbers of all tokens) of a rank."""
    group: Any = dist.group.WORLD
    share = OwnTokens(group, dist.get_rank())
    batch, count = (2, 10) if segments is None else (1, 12)
    sizes = (3, 2) if segments is None else (4, 2)
    share.leave(torch.zeros(batch, 1), Running(sizes=sizes, folded=folded, segments=segments))
    own = share.part(torch.arange(count))
    return own, share.total(own.sum().float()), share.total(own.float())


class Kept:
    """Of two rows of six places those where tokens are."""

    places = torch.tensor([0, 1, 2, 6, 7, 8])
    shape = (2, 6)


@pytest.mark.parametrize(
    ("folded", "segments", "places"),
    [
        (False, None, ([0, 1, 2, 5, 6, 7], [3, 4, 8, 9])),
        (True, None, ([0, 1, 4, 5, 6, 9], [2, 3, 7, 8])),
        (False, Kept(), ([0, 1, 2, 6], [7, 8])),
    ],
)
def test_losses_of_own_tokens_add_up_and_lie_where_the_tokens_do(
    folded: bool, segments: Any, places: tuple[list[int], list[int]]
) -> None:
    every = sorted(places[0] + places[1])
    for rank, (own, total, each) in enumerate(run(2, _losses, folded, segments)):
        assert own.tolist() == places[rank] and float(total) == sum(every)
        assert each.nonzero().flatten().tolist() == [at for at in every if at]
        assert torch.equal(each[each > 0], torch.tensor(every).float()[torch.tensor(every) > 0])
