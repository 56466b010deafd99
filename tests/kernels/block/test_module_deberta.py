"""Fused blocks of DeBERTa, whose attention is called as it is, with a table of positions besides: every
method trains as with the model's own blocks, on every rung and in every form of its scores; under plans;
memory; planted faults; what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.block.called import BoundCore, CalledCore, CoreCall
from petune.kernels.block.scored import ScoredAttention
from petune.kernels.block.varlen import of_rows
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.memory.buffers import kept_bytes, kept_sizes
from petune.kernels.memory.policy_hook import shape_of
from petune.models import family_of
from petune.parallel.plan import ParallelPlan
from petune.rng.context import bound, running
from tests.kernels.live import Live
from tests.kernels.own_blocks import LEVELS, assert_trains_alike, cells_of_plans, fused, tuned
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED

NAMES = ("deberta-classify", "deberta2-mlm")
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"r": 4, "dropout": 0.3}),
    "dora": ("dora", {"r": 4}),
    "ia3": ("ia3", {"targets": ["q", "k", "v", "o", "down"]}),
    "miss": ("miss", {"r": 4, "dropout": 0.3}),
    "adapter": ("adapter", {"reduction": 4, "dropout": 0.3}),
    "adapter, pfeiffer": ("adapter", {"kind": "pfeiffer", "reduction": 4}),
    "adapter, parallel": ("adapter", {"kind": "parallel", "reduction": 4}),
    "side": ("side", {"reduction": 4}),
}
CELLS = [
    pytest.param(
        method, keep, name, marks=() if at % 4 == level and NAMES[at % 2] == name else pytest.mark.long
    )
    for at, method in enumerate(METHODS)
    for level, keep in enumerate(LEVELS)
    for name in NAMES
]
FORMS: dict[str, dict[str, Any]] = {
    "c2p": {"pos_att_type": "c2p"},
    "p2c apart": {"pos_att_type": "p2c", "share_att_key": False},
    "no positions": {"relative_attention": False, "pos_att_type": None},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
}


def model_of(name: str, method: str, dtype: Any = torch.float64, **config: Any) -> Any:
    return tuned(name, *METHODS[method], dtype, **config)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keep", "name"), CELLS)
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: str, name: str) -> None:
    plain = model_of(name, method, **({} if method == "side" else DROPS))
    assert_trains_alike(fused(plain, keep), plain, batch(name))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_its_scores_trains_as_with_the_models_own(form: str, method: str) -> None:
    plain = model_of(NAMES[0], method, **FORMS[form] | DROPS)
    assert_trains_alike(fused(plain, "input"), plain, batch(NAMES[0], length=21), 2)


@pytest.mark.parametrize("form", ["int8", pytest.param("nf4", marks=pytest.mark.long)])
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(form: str) -> None:
    plain = tuned(NAMES[0], "lora", {"r": 4, "base_dtype": form}, torch.float32, **of_64(NAMES[0]))
    assert_trains_alike(fused(plain, "input"), plain, batch(NAMES[0]), 1)


def test_under_bfloat16_autocast_losses_and_gradients_are_near() -> None:
    plain = tuned(NAMES[0], "full", {}, torch.float32)
    made = fused(plain, "input")
    with torch.autocast("cpu", torch.bfloat16):
        (loss, found), (expected, wanted) = (gradients(one, batch(NAMES[0])) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) < 0.1 * float(value.norm()) + 2e-3, name
    assert not [block.spec.said for block in fused_blocks(made) if block.spec.said]


def test_without_gradients_and_in_eval_mode_it_computes_the_same() -> None:
    plain = model_of(NAMES[1], "lora").eval()
    made, inputs = fused(plain), batch(NAMES[1])
    with torch.no_grad():
        found, expected = (one(**inputs).logits[inputs["attention_mask"] != 0] for one in (made, plain))
    assert torch.allclose(found, expected, atol=1e-9)


def test_dropout_without_a_key_is_what_it_was_when_it_is_made_again() -> None:
    plain, found = model_of(NAMES[0], "lora", **DROPS), []
    for keep in ("all", "input"):
        torch.manual_seed(0)
        found.append((*gradients(fused(plain, keep), batch(NAMES[0])), torch.rand(1)))
    (loss, grads, after), (again, others, behind) = found
    assert torch.equal(loss, again) and torch.equal(after, behind)
    assert_same_gradients(grads, others, 1e-12)


# ------------------------------------------------------------------ memory


def held(model: Any, rows: int, tokens: int) -> float:
    """Bytes of a token that the first block keeps beside its parameters and the table."""
    table, found = torch.randn(16, 64, requires_grad=True), dict[int, Tensor]()
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), table)}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            found[value.untyped_storage().data_ptr()] = value
        return value

    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool)
    far = (torch.arange(tokens)[:, None] - torch.arange(tokens))[None]
    kept = None if (pairs := fused_blocks(model)[0].spec.pairs) else of_rows(rows, rows * tokens, far.device)
    x = torch.randn(*((rows, tokens) if pairs else (1, rows * tokens)), 64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)
    with bound(segments=kept), hooks:
        fused_blocks(model)[0](x, mask, relative_pos=far, rel_embeddings=table)
    return sum(value.untyped_storage().nbytes() for value in found.values()) / (rows * tokens)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_block_keeps_what_is_foretold_with_scores_of_all_keys(method: str, dropped: bool) -> None:
    model = fused(model_of(NAMES[0], method, torch.float32, **(DROPS if dropped else {})))
    spec = fused_blocks(model)[0].spec
    spec.pairs = True
    for tokens in (32, 96):
        said = kept_bytes(shape_of(spec, longest=tokens), "all")
        assert said == pytest.approx(held(model, 4, tokens), rel=0.05), tokens


def test_without_a_head_rows_keep_their_padding_and_scores_of_pairs_are_counted() -> None:
    base = copy.deepcopy(model_of(NAMES[0], "lora", torch.float32).base_model)
    done = fuse(base, family_of(base), "reference")
    assert done.blocks and not done.reasons, done.reasons
    handed: list[Any] = []
    base.encoder.layer[0].register_forward_pre_hook(
        lambda block, args, kwargs: handed.append((args, kwargs, running().segments)), with_kwargs=True
    )
    base(**{name: value for name, value in batch(NAMES[0]).items() if name != "labels"})
    ((args, _, segments),) = handed
    assert segments is None and args[1].dim() == 4  # a mask, with which transformers' attention computes
    assert all(block.spec.pairs for block in fused_blocks(base))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_block_keeps_what_is_foretold_without_scores_of_pairs(method: str) -> None:
    model = fused(model_of(NAMES[0], method, torch.float32))
    spec = fused_blocks(model)[0].spec
    for rows, tokens in ((1, 96), (4, 96)):
        said = kept_bytes(shape_of(spec, longest=tokens), "all")
        assert said == pytest.approx(held(model, rows, tokens), rel=0.08), (rows, tokens)


@pytest.mark.parametrize("dropped", [False, True])
def test_both_passes_of_a_core_hold_what_is_foretold(dropped: bool) -> None:
    model = fused(model_of(NAMES[0], "lora", torch.float32, **(DROPS if dropped else {})))
    spec, rows, tokens = fused_blocks(model)[0].spec, 4, 96
    spec.pairs = True
    (core,), m = spec.called, rows * tokens
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool)
    far = (torch.arange(tokens)[:, None] - torch.arange(tokens))[None]
    given = {"attention_mask": mask, "relative_pos": far}
    made = BoundCore(CoreCall(core, given, rows, running(), (False, torch.float32)), core.tensors)
    x, table, dy = torch.randn(m, 64), torch.randn(16, 64), torch.randn(m, 64)
    with Live() as ahead:
        graph = made.traced(x, table)
    with Live() as back:
        found = made.gradients(graph, dy, [True, True], [True] * len(core.names))
    assert all(one is not None for one in found[0])
    shape = shape_of(spec, longest=tokens).called_core
    assert shape.kept == pytest.approx(ahead.now / m, rel=0.05)
    assert shape.kept + shape.beside == pytest.approx(ahead.peak / m, rel=0.05)
    assert shape.within == pytest.approx(back.peak / m, rel=0.05)


def test_all_but_the_highest_rung_keep_nothing_of_a_core() -> None:
    shape = shape_of(fused_blocks(fused(model_of(NAMES[0], "lora")))[0].spec, longest=64)
    kept = [kept_sizes(shape, keep) for keep in ("all", "projections", "attention", "input")]
    assert ["attention.a.graph" in one for one in kept] == [True, False, False, False]
    assert shape.heads == 8 and shape.queries == 64


def test_weights_are_counted_once() -> None:
    for method in ("full", "lora"):
        model = fused(model_of(NAMES[0], method))
        block = fused_blocks(model)[0]
        shape = shape_of(block.spec)
        weights = sum(value.numel() for name, value in block.named_parameters() if value.dim() == 2)
        biases = sum(one.numel() for one in block.attention.self.parameters() if one.dim() == 1)
        tuned_numbers = sum(value.numel() for name, value in block.named_parameters() if "lora_" in name)
        assert shape.parameters == weights - tuned_numbers + biases
        assert shape.adapters == tuned_numbers


# ------------------------------------------------------------------ plans

PLANS: dict[str, ParallelPlan] = {
    **{name: BACKENDS[name](NAMES[0], 2) for name in ("tp", "shard", "pp-1f1b", "dp")},
    "pp-zero-bubble": LOOPED["pp-zero-bubble"](NAMES[0], 2),
    **{name: COMPOSED[name](NAMES[0]) for name in ("dp x tp", "tp x pp")},
}
SHORT = [("tp", "lora", 3), ("shard", "full", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "method", "kept"), cells_of_plans(PLANS, (0, 3), SHORT))
def test_ranks_of_a_plan_train_as_one_process_with_dropout(plan: str, method: str, kept: int) -> None:
    check(case(NAMES[0], method, PLANS[plan], steps=1, dropout=0.1, blocks=KEPT[kept]))


def test_blocks_whose_attention_reads_tokens_of_other_ranks_are_not_fused() -> None:
    own = replace(case(NAMES[0], "lora", BACKENDS["galaxy"](NAMES[0], 2), steps=1), blocks=KEPT[0])
    with pytest.raises(Exception, match="which is called as it is, reads tokens of other ranks"):
        check(own)


# ------------------------------------------------------------------ planted faults


def _no_table(self: BoundCore, graph: Any, dy: Tensor, asked: Any, needs: Any) -> Any:
    (dx, *_), found = BoundCore.gradients(self, graph, dy, asked, needs)
    return [dx, None if len(asked) == 1 else torch.zeros_like(graph[2])][: len(asked)], found


def _one_row(self: ScoredAttention, *args: Any) -> Tensor:
    whole = of_rows(1, self.segments.total, torch.device("cpu"))
    args = (args[0], None if args[1] is None else _distances(whole.total), *args[2:])
    return ScoredAttention.__call__(replace(self, segments=whole), *args)


def _distances(tokens: int) -> Tensor:
    """Columns of positions for each distance in a row of so many tokens."""
    return (4 - torch.arange(1 - tokens, tokens)).clamp(0, 7).to(torch.int32)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the draws of a core are not counted": (CalledCore, "draws", property(lambda self: 1)),
    "samples see one another": (ScoredAttention, "__call__", _one_row),
    "the table learns nothing": (BoundCore, "gradients", _no_table),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_around_a_core_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = FAULTS[fault]
    plain = model_of(NAMES[0], "full", **DROPS)
    made = fused(plain, "input")
    twin = type(owner.__name__, (), {name: getattr(owner, name)})
    if callable(wrong):  # it calls what it stands for
        monkeypatch.setitem(wrong.__globals__, owner.__name__, twin)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, IndexError)):  # of a draw too many
        assert_trains_alike(made, plain, batch(NAMES[0]), 1)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("lacking", ["query_states", "rel_embeddings"])
def test_calls_that_it_does_not_know_go_to_the_models_own_blocks(lacking: str) -> None:
    plain = model_of(NAMES[0], "full").eval()
    block, own = fused_blocks(fused(plain))[0], plain.deberta.encoder.layer[0]
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    far = (torch.arange(5)[:, None] - torch.arange(5))[None]
    given: dict[str, Any] = {"relative_pos": far, "rel_embeddings": plain.deberta.encoder.get_rel_embedding()}
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    if lacking == "query_states":
        given["query_states"] = torch.randn(2, 5, 64, dtype=torch.float64)
        assert torch.equal(block(x, mask, **given)[0], own(x, mask, **given)[0])
        assert block.spec.said == {"its queries are made of others than its hidden states"}
    else:
        assert block.declines(x, given | {"rel_embeddings": None}) == "it is handed no table of positions"


def test_where_blocks_meet_padding_is_computed_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = fused(model_of(NAMES[0], "lora", conv_kernel_size=3, conv_act="gelu"))
    said = "padding, where there is any, is computed too: tokens meet between its blocks"
    assert said in caplog.text and fused_blocks(made)[0].spec.pairs


def test_padding_before_tokens_is_masked_as_in_the_models_own_blocks() -> None:
    plain = model_of(NAMES[1], "full", **DROPS)
    inputs = {name: value.flip(1) for name, value in batch(NAMES[1]).items()}
    assert int(inputs["attention_mask"][1, 0]) == 0
    assert_trains_alike(fused(plain, "input"), plain, inputs)


def test_scores_of_pairs_are_counted_in_calls_that_keep_their_padding() -> None:
    model, found = copy.deepcopy(model_of(NAMES[1], "lora")), []
    fuse(model, family_of(model), "reference")
    (spec, *_), inputs = [block.spec for block in fused_blocks(model)], batch(NAMES[1])
    for given in (inputs, {name: value.flip(1) for name, value in inputs.items()}, inputs):
        model(**given)
        found.append((spec.pairs, kept_bytes(shape_of(spec, longest=96), "all")))
    assert [pairs for pairs, _ in found] == [False, True, False]
    assert found[1][1] > found[0][1] == found[2][1]


def test_a_bottleneck_without_a_kernel_behind_a_core_is_refused() -> None:
    model = tuned(NAMES[0], "adapter", {"reduction": 4, "activation": "tanh"})
    with pytest.raises(UsageError, match=r"'tanh' of the bottleneck behind attention\.output\.dense has no"):
        fuse(model, family_of(model), "reference")
