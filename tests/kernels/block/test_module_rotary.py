"""Fused blocks whose positions turn columns side by side (GLM-4, Cohere) or the first of a head in halves
(Phi-4-mini), whose MLP stands beside attention (Cohere), whose heads are normed by weights of their own
(Command R+), whose queries are multiplied by what their positions say (Ministral 3): each method on every
rung, plans, recordings, weights that stream, bytes; what is refused; planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import fuse as fusing
from petune.kernels import reference
from petune.kernels.block import layout, module, rotary_steps
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.head.hooks import has_fused_head
from petune.kernels.memory.buffers import kept_bytes
from petune.kernels.memory.offload import Store
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import wrap
from petune.models import family_of
from tests.kernels import own_blocks
from tests.kernels.fused_pairs import stand_on
from tests.kernels.own_blocks import assert_streams_alike, assert_trains_alike, fused, tuned
from tests.kernels.replays import replayed
from tests.methods.more_models import TURNED
from tests.methods.zoo import batch, gradients, of_64, tiny
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED, OVERLAPPED

NAMES = ("glm4-causal", "ministral3-causal", "cohere-causal", "cohere2-causal", "phi4-causal")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"r": 4, "dropout": 0.3}),
    "lora of a rank too large to fold": ("lora", {"r": 40}),
    "lora on q and down": ("lora", {"r": 4, "targets": ["q", "down"]}),
    "dora": ("dora", {"r": 4}),
    "ia3": ("ia3", {"targets": ["q", "k", "v", "o", "down"]}),
    "miss": ("miss", {"r": 4, "dropout": 0.3}),
    "adapter": ("adapter", {"reduction": 4, "dropout": 0.3}),
    "pfeiffer": ("adapter", {"reduction": 4, "kind": "pfeiffer"}),
    "parallel": ("adapter", {"reduction": 4, "kind": "parallel"}),
    "side": ("side", {"reduction": 4}),
}
WHOLE = ("phi4-causal", "ia3")
LEVELS: tuple[Any, ...] = ("all", "projections", "attention", "input")
ROWS = ("padded", "packed", "whole", "one row")  # of one row alone heads lie apart


def shortly(*names: str) -> list[Any]:
    """All, those that are not named in the long suite."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in NAMES]


def rows_of(name: str, kind: str) -> dict[str, Any]:
    """A batch of rows of unequal length, of two samples each, or of equal length without a mask."""
    if kind == "packed":
        return own_blocks.packed(name)
    inputs = batch(name, length=9, rows=1 if kind == "one row" else 3)
    return inputs if kind == "padded" else {key: inputs[key] for key in inputs if key != "attention_mask"}


def method_of(name: str, method: str) -> tuple[str, dict[str, Any]]:
    """The method and its settings; vectors scale a linear that is several as a whole."""
    kind, settings = METHODS[method]
    return kind, settings | ({"targets": ["qkv", "o", "down"]} if (name, kind) == WHOLE else {})


def pair(name: str, method: str = "lora", keep: Any = "all", **config: Any) -> tuple[Any, Any]:
    """A tuned model, fused and not, that tiles what it may and drops attention's probabilities out."""
    kind, settings = method_of(name, method)
    own = config if kind == "side" else {"attention_dropout": 0.2, **config}
    plain = tuned(name, kind, settings, **own)
    with torch.no_grad():  # weights of norms are no ones
        for at, (path, value) in enumerate(plain.named_parameters()):
            if "norm" in path:
                value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(at))
    made = fused(plain, keep)
    stand_on(made, Rung(keep), tile=None if keep == "all" else 4)
    return made, plain


@pytest.mark.crossed(1)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("keep", LEVELS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_trains_as_with_the_models_own_blocks(
    name: str, method: str, keep: Any, rows: str
) -> None:
    assert_trains_alike(*pair(name, method, keep), rows_of(name, rows), 2)


@pytest.mark.parametrize("name", shortly("glm4-causal", "cohere-causal"))
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(name: str) -> None:
    form = {"glm4-causal": "nf4"}.get(name, "int8")
    plain = tuned(name, "lora", {"r": 4, "base_dtype": form}, torch.float32, **of_64(name))
    assert_trains_alike(fused(plain, "input"), plain, rows_of(name, "packed"), 1)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_heads_without_norms_train_as_the_models_own_blocks(method: str) -> None:
    """Command R's; the zoo has Command R+'s."""
    made, plain = pair("cohere-causal", method, "input", use_qk_norm=False)
    assert_trains_alike(made, plain, rows_of("cohere-causal", "packed"), 1)


@pytest.mark.parametrize("name", shortly("ministral3-causal", "cohere2-causal"))
def test_under_bfloat16_autocast_losses_and_gradients_are_near(name: str) -> None:
    plain = tuned(name, "lora", {"r": 4}, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        both = [gradients(one, rows_of(name, "padded")) for one in (fused(plain, "input"), plain)]
    (loss, found), (expected, wanted) = both
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    for key, value in wanted.items():
        assert float((found[key] - value).norm()) < 0.1 * float(value.norm()) + 1e-3, key


@pytest.mark.parametrize("window", [4, None])
def test_queries_are_multiplied_within_windows_and_wherever_rows_begin(window: int | None) -> None:
    """Positions of each row by themselves, most of them beyond the first training's."""
    made, plain = pair("ministral3-causal", "dora", "input", sliding_window=window)
    inputs = rows_of("ministral3-causal", "whole") | {"use_cache": False}
    begins = torch.tensor([[3], [40], [0]])[: len(inputs["input_ids"])]
    inputs["position_ids"] = begins + torch.arange(9)
    assert_trains_alike(made, plain, inputs, 1)


@pytest.mark.parametrize("name", ["cohere-causal", "cohere2-causal"])
def test_logits_that_are_scaled_have_their_loss_without_logits(name: str) -> None:
    made, plain = pair(name)
    assert has_fused_head(made)
    inputs = rows_of(name, "padded")
    assert_trains_alike(made, plain, inputs, 1)
    assert made.logit_scale != 1


@pytest.mark.parametrize("name", [*shortly("cohere-causal"), pytest.param("normed", marks=pytest.mark.long)])
def test_kernels_of_triton_train_as_plain_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With results that are scaled, so that the way back goes through that and through positions at once; or
    with norms of heads that train."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    heads |= {"head_dim": 16} if name in ("glm4-causal", "ministral3-causal", "cohere2-causal") else {}
    scaled = ["qkv"] if name == "phi4-causal" else ["q", "k"]
    method: Any = ("full", {}) if name == "normed" else ("ia3", {"targets": [*scaled, "down"]})
    heads |= {"use_qk_norm": name == "normed"} if name in ("cohere-causal", "normed") else {}
    name = "cohere-causal" if name == "normed" else name
    plain = tuned(name, *method, torch.float32, **heads, num_hidden_layers=2)
    own_blocks.assert_trains_by_triton(plain, batch(name, rows=2, length=6), monkeypatch)


# ------------------------------------------------------------------ plans, recordings, streams, bytes

PLANS: dict[str, Any] = {
    **{name: lambda own, name=name: BACKENDS[name](own, 2) for name in BACKENDS if name != "dp"},
    **{f"{name}, overlapped": lambda own, name=name: OVERLAPPED[name](own, 2) for name in OVERLAPPED},
    **{name: lambda own, name=name: LOOPED[name](own, 2) for name in LOOPED},
    **{name: lambda own, name=name: COMPOSED[name](own) for name in COMPOSED},
}
KINDS = ("lora", "full", "adapter")
SHORT = {("sp-gather", 0), ("sp-ring", 1), ("tp, overlapped", 2), ("pp-1f1b", 1), ("galaxy", 2), ("cut", 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "name"),
    [
        pytest.param(plan, name, marks=() if (plan, at) in SHORT else pytest.mark.long)
        for plan in PLANS
        for at, name in enumerate(NAMES)
    ],
)
def test_ranks_of_a_plan_train_as_one_process_with_dropout(plan: str, name: str) -> None:
    turn = [*PLANS].index(plan) + NAMES.index(name)
    check(case(name, KINDS[turn % 3], PLANS[plan](name), steps=1, dropout=0.1, blocks=KEPT[turn % 4]))


@pytest.mark.parametrize(
    "name",
    [
        *("glm4-causal", "cohere-causal", "cohere2-causal", "smollm3-causal"),
        pytest.param("phi4-causal", marks=pytest.mark.long),
    ],
)
def test_blocks_are_replayed_though_the_first_has_no_positions(name: str) -> None:
    none = {"cohere2-causal": {"layer_types": ["full_attention", "sliding_attention"]}}
    none["smollm3-causal"] = {"no_rope_layers": [0, 1] * 2}
    plain = tuned(name, "lora", {"r": 4}, **none.get(name, {}))
    made = fused(plain)
    recorder = replayed(made)
    for kind in ("padded", "whole", "padded"):
        assert_trains_alike(made, plain, rows_of(name, kind), 1)
    assert recorder.backwards


def test_blocks_that_multiply_queries_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = pair("ministral3-causal")
    specs = [block.spec for block in fused_blocks(made)]
    ops, store = replace(specs[0].ops, name="triton"), Store(torch.device("cpu"), None)
    plan = fusing.Plan(ops, MemoryConfig(), store, [made], 1.0, 1, 0.0)
    assert not fusing._recordable(made, specs, plan)
    monkeypatch.setattr(specs[0].program, "reach", ())
    assert fusing._recordable(made, specs, plan)


@pytest.mark.parametrize("name", ["cohere-causal", "ministral3-causal"])
def test_blocks_stream(name: str) -> None:
    plain = tuned(name, "full", {}, torch.float32)
    assert_streams_alike(fused(plain), plain, rows_of(name, "padded"))


def held(model: Any, number: int) -> float:
    """Bytes of a token that one block keeps beside its parameters and what is given to every block."""
    block, found = fused_blocks(model)[number], dict[int, int]()
    samples, tokens = 8, 128  # short ones: what attention holds meanwhile grows with their square
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    x = torch.randn(samples, tokens, 64, dtype=next(model.parameters()).dtype, requires_grad=True)
    places = torch.arange(tokens)[None]
    angles = model.model.rotary_emb(x, places)
    own |= {one.untyped_storage().data_ptr() for one in angles}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = block(x, position_embeddings=angles, position_ids=places)
    assert y.requires_grad
    return sum(found.values()) / (samples * tokens)


@pytest.mark.crossed
@pytest.mark.parametrize("method", ["lora on q and down", "full", "ia3", "adapter"])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_the_bytes_that_are_foretold(name: str, method: str) -> None:
    kind, settings = method_of(name, method)
    model = wrap(tiny(name, max_position_embeddings=512), kind, **settings)
    fuse(model, family_of(model), "reference")
    for keep in LEVELS:
        stand_on(model, Rung(keep))
        for number, block in enumerate(fused_blocks(model.train())):
            shape = shape_of(block.spec)
            sums = 0 if keep == "input" else 4 * shape.heads  # which attention of torch's does not keep
            assert kept_bytes(shape, keep) - sums == pytest.approx(held(model, number), rel=0.02), keep


# ------------------------------------------------------------------ what is refused


def test_a_share_of_columns_that_attention_does_not_know_leaves_blocks_unfused() -> None:
    made = tuned("llama-causal", "lora", {"r": 4}, rope_parameters=TURNED)
    done = fuse(made, family_of(made), "reference")
    assert not done.blocks and any("turn 50% of a head's columns" in one for one in done.reasons)


# ------------------------------------------------------------------ planted faults


def _otherwise(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, neighbours: bool, width: int) -> Tensor:
    return _TURN(qkv, cos, sin, heads, not neighbours, width)


def _the_last(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, neighbours: bool, width: int) -> Tensor:
    return _TURN(qkv.flip(1), cos, sin, heads, neighbours, width).flip(1)


def _back_as_halves(*given: Any) -> Tensor:
    return _TURN_BACK(*given[:5])


def _no_twins(angles: Any, head_dim: int, pairs: Any) -> Any:
    return layout.angles_of(angles, head_dim, "neighbours")


def _once_more(q: Tensor, reach: Tensor) -> None:
    _STRETCH(q, reach.square())


def _ahead_alone(q: Tensor, reach: Tensor) -> None:
    if q.dim() == 2:
        _STRETCH(q, reach)


def _of_a_copy(q: Tensor, reach: Tensor) -> None:
    _STRETCH(q.flatten(1), reach)


_STRETCH = rotary_steps._stretch
_TURN, _TURN_BACK = reference.rope_, reference.rope_backward


def _of_first_heads(raw: Tensor, weights: Any, *given: Any) -> Tensor:
    return _NORM(raw, tuple(weight[:1].expand_as(weight) for weight in weights), *given)


def _uncentred(*given: Any) -> Any:
    return _NORM_BACK(*given[:-2], False, given[-1])


_NORM, _NORM_BACK = reference.norm_rope, reference.norm_rope_backward
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "halves are turned": ("glm4-causal", reference, "rope_", _otherwise),
    "columns side by side are turned": ("phi4-causal", reference, "rope_", _otherwise),
    "the last columns of heads are turned": ("phi4-causal", reference, "rope_", _the_last),
    "halves are turned back": ("glm4-causal", reference, "rope_backward", _back_as_halves),
    "angles of twins are read as if they were in halves": ("cohere-causal", module, "angles_of", _no_twins),
    "weights of the first head norm all": ("cohere-causal", reference, "norm_rope", _of_first_heads),
    "heads are not centred on the way back": ("cohere-causal", reference, "norm_rope_backward", _uncentred),
    "queries are multiplied twice": ("ministral3-causal", rotary_steps, "_stretch", _once_more),
    "where heads lie apart, a copy's gradients are": (
        "ministral3-causal",
        rotary_steps,
        "_stretch",
        _of_a_copy,
    ),
    "their gradients are not": ("ministral3-causal", rotary_steps, "_stretch", _ahead_alone),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, wrong = FAULTS[fault]
    made, plain = pair(name, keep="input")
    if owner is reference:
        for block in fused_blocks(made):
            block.spec.ops = replace(block.spec.ops, **{attribute: wrong})
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        assert_trains_alike(made, plain, rows_of(name, "one row"), 1)
