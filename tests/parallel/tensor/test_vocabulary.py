"""A vocabulary cut across ranks against a whole one: embeddings, logits, losses and gradients of every
family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import DistributedError
from petune.kernels.dispatch import reference_ops
from petune.kernels.head import linear_cross_entropy as heads
from petune.kernels.head.hooks import fuse_head, head_loss
from petune.methods import tuned_parameters, wrap
from petune.parallel.collectives import all_sum_, gather_dim
from petune.parallel.tensor import vocabulary
from petune.parallel.tensor.shard_params import Placed, Slice
from petune.parallel.tensor.vocabulary import (
    Logits,
    VocabularyRows,
    cut_vocabulary,
    has_cut_head,
    hook_vocabulary,
    refusal,
    vocabulary_losses,
)
from petune.run.evaluate import forward, outputs_of
from petune.tasks.loss import loss_sum, trained_positions
from tests.methods.zoo import GENERATE, VOCAB, assert_same_gradients, batch, prompt, stir, tiny
from tests.pool import run

SHARES = {2: (61, 36), 3: (50, 30, 17)}
Tensors = dict[str, Tensor]


def cut_here(model: nn.Module, sizes: tuple[int, ...]) -> Placed:
    rank = dist.get_rank()
    placed = cut_vocabulary(model, sizes, rank)
    hook_vocabulary(model, sizes, dist.group.WORLD, rank)
    return placed


def gathered(tensors: Tensors, placed: Placed) -> Tensors:
    """Whole gradients: parts joined, terms of a sum added."""
    found = {}
    for name, value in tensors.items():
        if name in placed.partial:
            all_sum_([value], dist.group.WORLD)
        part = placed.slices.get(name)
        found[name] = (
            value if part is None else gather_dim(value, part.sizes, int(part.dim), dist.group.WORLD)
        )
    return found


def grads_of(model: nn.Module) -> Tensors:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


# ------------------------------------------------------------------ models


def llama_tied() -> Any:
    return tiny("llama-causal", tie_word_embeddings=True)


def llama_head_tuned() -> Any:
    model = tiny("llama-causal")
    wrap(model, "lora", r=4, targets=["lm_head", "q_proj"])
    stir(model, std=0.1)
    return model


def bart_biased() -> Any:
    model = tiny("bart-seq2seq", scale_embedding=True)
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(3))
    return model


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama-untied": ("llama-causal", lambda: tiny("llama-causal")),
    "llama-tied": ("llama-causal", llama_tied),
    "llama-lora-head": ("llama-causal", llama_head_tuned),
    "t5-tied": ("t5-seq2seq", lambda: tiny("t5-seq2seq")),
    "t5-untied": ("t5-gated", lambda: tiny("t5-gated")),
    "bart-tied": ("bart-seq2seq", bart_biased),
    "bert-mlm": ("bert-mlm", lambda: tiny("bert-mlm")),
    "gemma3-capped": ("gemma3-causal", lambda: tiny("gemma3-causal", final_logit_softcapping=0.5)),
}


def data_of(name: str) -> tuple[str, Tensors]:
    return "causal" if name.endswith("causal") else "seq2seq", batch(name)


def whole_of(build: Callable[[], Any], name: str, dtype: torch.dtype) -> dict[str, Any]:
    model, (task, inputs) = build().to(dtype), data_of(name)
    logits = forward(model, inputs)
    loss, _ = loss_sum(logits, inputs, task)
    loss.backward()
    return {"logits": logits.detach(), "loss": loss.detach(), "grads": grads_of(model)}


def fused_parts_of(
    build: Callable[[], Any], name: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """By a fused head; with one that must run by itself, too, whose loss is made of logits."""
    model, (task, inputs) = build().to(dtype), data_of(name)
    placed = cut_here(model, sizes)
    assert fuse_head(model, reference_ops())
    with torch.no_grad():
        whole = forward(model, inputs)
    loss = head_loss(model, inputs, outputs_of, shift=task == "causal")
    loss.backward()
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    made = head_loss(model, inputs, outputs_of, shift=task == "causal")
    assert float(made.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert ["others have hooks" in reason for reason in model.petune_fused_head.said] == [True]
    return {"logits": whole, "loss": loss, "grads": gathered(grads_of(model), placed)}


def parts_of(
    build: Callable[[], Any], name: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> dict[str, Any]:
    model, (task, inputs) = build().to(dtype), data_of(name)
    names = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    placed = cut_here(model, sizes)
    assert [key for key, _ in model.named_parameters(remove_duplicate=False)] == names
    with torch.no_grad():
        whole = forward(model, inputs)
    logits = forward(model, inputs)
    assert logits.shape == (*whole.shape[:-1], sizes[dist.get_rank()])
    chosen, gold = trained_positions(logits, inputs["labels"], task)
    loss = vocabulary_losses(chosen, gold, dist.group.WORLD, sum(sizes[: dist.get_rank()])).sum()
    loss.backward()
    return {"logits": whole, "loss": loss, "grads": gathered(grads_of(model), placed)}


EXACT = [
    (label, 3 if label in ("llama-tied", "t5-tied", "bart-tied") else 2, torch.float64) for label in MODELS
]
SINGLE = [(label, 2, torch.float32) for label in ("llama-untied", "t5-tied", "bart-tied")]


def but(*labels: str) -> list[Any]:
    """All cells, those in float64 of some models and those in float32 of all but T5 in the long suite."""
    return [pytest.param(*cell, marks=pytest.mark.long if cell[0] in labels else ()) for cell in EXACT] + [
        pytest.param(*cell, marks=pytest.mark.long if cell[0] != "t5-tied" else ()) for cell in SINGLE
    ]


@pytest.mark.parametrize(("label", "world", "dtype"), but("t5-tied", "llama-untied"))
def test_a_cut_model_has_the_logits_loss_and_gradients_of_a_whole_one(
    label: str, world: int, dtype: torch.dtype
) -> None:
    assert_whole(parts_of, label, world, dtype)


@pytest.mark.parametrize(("label", "world", "dtype"), but("t5-tied", "t5-untied", "llama-tied"))
def test_a_cut_head_without_logits_has_the_loss_and_gradients_of_a_whole_one(
    label: str, world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a few rows."""
    monkeypatch.setattr(heads, "chunk_rows", lambda *_: 5)
    assert_whole(fused_parts_of, label, world, dtype)


def assert_whole(parts: Callable[..., dict[str, Any]], label: str, world: int, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-6
    name, build = MODELS[label]
    expected = whole_of(build, name, dtype)
    for found in run(world, parts, build, name, dtype, SHARES[world]):
        assert found["loss"].dtype == expected["loss"].dtype
        assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=tolerance)
        assert_same_gradients({"logits": found["logits"]}, {"logits": expected["logits"]}, 10 * tolerance)
        assert_same_gradients(
            found["grads"], expected["grads"], 10 * tolerance if dtype is torch.float32 else tolerance
        )


def test_without_the_copy_before_the_head_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "copy", lambda x, group: x)
    name, build = MODELS["llama-untied"]
    expected = whole_of(build, name, torch.float64)["grads"]["model.norm.weight"]
    found = run(2, parts_of, build, name, torch.float64, SHARES[2])[0]["grads"]["model.norm.weight"]
    assert float((found - expected).abs().max()) > 1e-2 * float(expected.abs().max())


@pytest.mark.parametrize("label", ["llama-tied", "t5-tied", "bart-tied"])
def test_a_cut_model_generates_what_a_whole_one_does(label: str) -> None:
    name, build = MODELS[label]

    def generate() -> Tensor:
        model = build()
        if dist.is_initialized():
            cut_here(model, SHARES[2])
        found: Tensor = model.generate(**prompt(name), **GENERATE)
        return found

    expected = generate()
    for found in run(2, generate):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------ embeddings


class Looking(nn.Module):
    """The least that has a table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, 6, dtype=torch.float64, **settings)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids)
        return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("padding", [None, 0, 96])
def test_an_embedding_finds_every_row_and_gives_it_its_gradient_but_for_the_padding(
    world: int, padding: int | None
) -> None:
    ids = torch.tensor([[0, 96, 5, 5], [49, 50, 61, 0]])
    weights = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def look(model: nn.Module) -> Tensors:
        output = model(ids)
        (output * weights).sum().backward()
        return {"output": output, "grad": model.get_input_embeddings().weight.grad}  # type: ignore[operator]

    def parts() -> Tensors:
        model = Looking(padding_idx=padding)
        placed = cut_here(model, SHARES[world])
        found = look(model)
        return found | {"grad": gathered({"table.weight": found["grad"]}, placed)["table.weight"]}

    expected = look(Looking(padding_idx=padding))
    for found in run(world, parts):
        assert torch.equal(found["output"], expected["output"])
        assert torch.equal(found["grad"], expected["grad"])


def test_an_id_beyond_the_vocabulary_fails_as_it_does_in_one_process() -> None:
    def look(number: int) -> None:
        model = Looking()
        cut_here(model, SHARES[2])
        with pytest.raises(IndexError):
            model(torch.tensor([number]))

    run(2, look, VOCAB)
    run(2, look, -1)


def test_an_embedding_keeps_its_dtype() -> None:
    def look() -> str:
        model = tiny("bert-classify").to(torch.bfloat16)
        cut_here(model, SHARES[2])
        assert not has_cut_head(model)
        return str(forward(model, batch("bert-classify")).dtype)

    assert run(2, look) == ["torch.bfloat16"] * 2


# ------------------------------------------------------------------ narrowing


def test_narrowing_needs_no_memory_and_says_what_lies_where() -> None:
    with torch.device("meta"):
        model = tiny("bart-seq2seq")
    model.tie_weights()
    placed = cut_vocabulary(model, SHARES[3], 1)
    tied = {
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    }
    assert placed.slices == dict.fromkeys(tied, Slice(0, SHARES[3])) and not placed.partial
    assert {id(model.get_parameter(name)) for name in tied} == {id(model.lm_head.weight)}
    assert model.lm_head.weight.is_meta and model.lm_head.weight.shape == (30, 64)
    assert model.lm_head.out_features == model.model.shared.num_embeddings == 30
    assert has_cut_head(model)


def test_what_does_not_train_stays_frozen() -> None:
    model = llama_head_tuned()
    placed = cut_vocabulary(model, SHARES[2], 0)
    assert placed.partial == {"lm_head.lora_A"}
    assert set(placed.slices) == {"model.embed_tokens.weight", "lm_head.weight", "lm_head.lora_B"}
    assert not model.lm_head.weight.requires_grad and not model.model.embed_tokens.weight.requires_grad
    assert model.lm_head.lora_B.requires_grad and id(model.lm_head.lora_B) in map(
        id, tuned_parameters(model).values()
    )


def test_a_tuned_embedding_and_other_unfit_tables_are_refused_with_the_reason() -> None:
    model = tiny("llama-causal")
    assert refusal(model) is None
    wrap(model, "lora", r=4, targets=["embed_tokens"])
    assert "tuned" in str(refusal(model))
    assert "max_norm" in str(refusal(Looking(max_norm=1.0)))
    assert "no table" in str(refusal(nn.Linear(2, 2)))
    wider = tiny("llama-causal")
    wider.lm_head = nn.Linear(64, VOCAB + 3)
    assert "97, 100" in str(refusal(wider))


# ------------------------------------------------------------------ hooks


def test_the_bias_of_a_model_is_whole_again_after_an_error() -> None:
    def fail() -> int:
        model = bart_biased()
        cut_here(model, SHARES[2])
        model.lm_head.register_forward_hook(_stumble)
        with pytest.raises(ArithmeticError):
            forward(model, batch("bart-seq2seq"))
        return int(model.final_logits_bias.shape[-1])

    assert run(2, fail) == [VOCAB] * 2


def _stumble(module: nn.Module, args: Any, output: Any) -> None:
    raise ArithmeticError


def test_a_copy_of_a_hooked_model_talks_over_the_same_group() -> None:
    def again() -> Tensors:
        model = bart_biased()
        cut_here(model, SHARES[2])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            return {
                "model": forward(model, batch("bart-seq2seq")),
                "twin": forward(twin, batch("bart-seq2seq")),
            }

    for found in run(2, again):
        assert torch.equal(found["model"], found["twin"])


@pytest.mark.parametrize("kind", [VocabularyRows, Logits])
def test_a_hook_that_lost_its_group_on_the_way_says_so(kind: type[VocabularyRows] | type[Logits]) -> None:
    def call() -> None:
        hook = copy.copy(kind(SHARES[2], dist.group.WORLD, 1))  # by the protocol of pickling
        hook.others = torch.zeros(2, dtype=torch.bool)
        with torch.no_grad(), pytest.raises(DistributedError, match="cannot reach"):
            hook.after(nn.Identity(), (), torch.zeros(2, SHARES[2][1]))

    run(2, call)


# ------------------------------------------------------------------ loss


def loss_parts(logits: Tensor, labels: Tensor, sizes: tuple[int, ...], factor: float = 1.0) -> dict[str, Any]:
    rank = dist.get_rank()
    first = sum(sizes[:rank])
    own = logits[:, first : first + sizes[rank]].clone().requires_grad_()
    loss = vocabulary_losses(own, labels, dist.group.WORLD, first).sum()
    (loss * factor).backward()
    return {"loss": loss, "grad": gather_dim(own.grad, sizes, 1, dist.group.WORLD)}  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1.0, torch.float64), (1e4, torch.float64), (1.0, torch.float32), (1.0, torch.bfloat16)],
)
def test_the_loss_is_a_cross_entropy_however_large_the_logits(
    world: int, scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (scale * torch.randn(11, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.tensor([0, 96, 49, 50, 61, -100, 7, 7, 80, -1, 33])
    whole = logits.clone().requires_grad_()
    wide = whole.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide, labels.where(labels >= 0, -100), reduction="sum")
    (expected * 0.25).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for found in run(world, loss_parts, logits, labels, SHARES[world], 0.25):
        assert found["loss"].dtype == wide.dtype
        assert float(found["loss"]) == pytest.approx(
            float(expected.detach()), rel=1e-12 if dtype is torch.float64 else 1e-6
        )
        assert found["grad"].dtype == dtype
        assert float((found["grad"] - whole.grad).abs().max()) <= tolerance


def test_no_trained_position_is_a_loss_of_zero() -> None:
    for found in run(2, loss_parts, torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.long), SHARES[2]):
        assert float(found["loss"]) == 0
        assert found["grad"].shape == (0, VOCAB)


def test_a_label_that_no_rank_has_makes_the_loss_nan_on_all_ranks() -> None:
    for found in run(2, loss_parts, torch.zeros(2, VOCAB), torch.tensor([3, VOCAB]), SHARES[2]):
        assert found["loss"].isnan()


def test_the_loss_in_one_process_is_the_plain_one() -> None:
    logits = torch.randn(5, VOCAB, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(5)
    assert torch.autograd.gradcheck(lambda x: vocabulary_losses(x, labels, None, 0).sum(), [logits])
    with torch.no_grad():
        assert float(vocabulary_losses(logits, labels, None, 0).sum()) == pytest.approx(
            float(F.cross_entropy(logits, labels, reduction="sum"))
        )
