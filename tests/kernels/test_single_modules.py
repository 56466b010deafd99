"""Modules fused one by one compute what they did: T5, BART and what has no family, whole and cut, trained,
recomputed and compiled."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import petune
from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.kernels.dispatch import reference_ops
from petune.kernels.fuse import fuse, fuse_modules, unfuse
from petune.kernels.single_modules import (
    FusedGelu,
    FusedLora,
    FusedNorm,
    FusedShiftedNorm,
    FusedSite,
    fuse_sites,
    unfuse_sites,
)
from petune.methods import without_tuning
from petune.methods.configs import LoraConfig
from petune.methods.lora import LoraLinear, tune
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.frozen_weight import restore_dense
from petune.models.stack import own_stacks
from petune.models.tuned_linear import TunedLinear
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.methods import zoo
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

MODELS = ("t5-seq2seq", "t5-gated", "t5-classify", "bart-seq2seq", "bart-classify")
OPS = reference_ops()


class ExactNorm(T5LayerNorm):
    """T5's norm in the dtype of its input, float64 too, where T5's own computes in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden_states * scale)


def pair(
    name: str, dtype: torch.dtype = torch.float64, update_dropout: float = 0.0, **changes: Any
) -> tuple[nn.Module, nn.Module]:
    """The same model with updates on all linears that are not zero, twice: fused and not."""
    plain = zoo.tiny(name, **changes).to(dtype)
    petune.wrap(plain, r=4, dropout=update_dropout, targets="all-linear", kernels="off")
    zoo.stir(plain)
    for module in plain.modules():
        if dtype == torch.float64 and isinstance(module, T5LayerNorm):
            module.__class__ = ExactNorm
    fused = copied(plain)
    assert fuse_sites(fused, OPS)
    return fused, plain


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> None:
    """Same loss and gradients of the same names."""
    (loss, found), (expected, wanted) = zoo.gradients(fused, inputs), zoo.gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) <= tolerance * float(
            value.abs().max().clamp(min=1e-9)
        ), name


def of(model: nn.Module, kind: type[FusedSite]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def layer(
    k: int = 6, n: int = 5, *, bias: bool = True, dtype: torch.dtype = torch.float64, **settings: Any
) -> LoraLinear:
    """One tuned linear with an update."""
    torch.manual_seed(3)
    base = nn.Linear(k, n, bias=bias, dtype=dtype).requires_grad_(False)
    tuned = tune(
        base, LoraConfig(r=2, **settings), {"lora_A": torch.randn(2, k), "lora_B": torch.randn(n, 2)}
    )
    assert isinstance(tuned, LoraLinear)
    return tuned.to(dtype) if dtype == torch.float64 else tuned


def fused_copy(module: nn.Module) -> nn.Module:
    fused = copied(module)
    assert fuse_sites(fused, OPS) == 1
    return fused


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and the gradients of the input and of what trains."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = module(x)
    (y.double() * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)).sum().backward()
    return y.detach(), [x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(
    found: tuple[Tensor, list[Tensor | None]],
    expected: tuple[Tensor, list[Tensor | None]],
    tolerance: float = 1e-12,
) -> None:
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ models


@pytest.mark.crossed
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_the_unfused_model(
    name: str, dtype: torch.dtype, training: bool
) -> None:
    exact = dtype == torch.float64
    # in the zoo as it is, float32 rounding reaches 3e-3 of a gradient: T5 attends too steeply, and gradients
    # of BART's keys cancel
    gentle = {"initializer_factor": 0.3} if name.startswith("t5") else {"init_std": 0.2}
    fused, plain = pair(name, dtype, **({} if exact else gentle))
    assert_alike(fused.train(training), plain.train(training), zoo.batch(name), 1e-10 if exact else 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_every_tuned_linear_and_rms_norm_is_fused_and_counted(name: str) -> None:
    plain = zoo.tiny(name)
    petune.wrap(plain, r=4, targets="all-linear", kernels="off")
    linears = sum(isinstance(module, LoraLinear) for module in plain.modules())
    norms = sum(isinstance(module, T5LayerNorm) for module in plain.modules())
    gelus = sum("NewGELU" in type(module).__name__ for module in plain.modules())
    assert fuse_sites(plain, OPS) == linears + norms + gelus
    assert (len(of(plain, FusedLora)), len(of(plain, FusedNorm)), len(of(plain, FusedGelu))) == (
        linears,
        norms,
        gelus,
    )
    assert linears and bool(norms) == name.startswith("t5") and bool(gelus) == (name == "t5-gated")
    assert fuse_sites(plain, OPS) == 0


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_each_tuned_part_of_one_linear_is_fused_as_a_linear_of_its_own(p: float) -> None:
    """GLM-4's gate and up are one, and its blocks are not fused."""
    plain = zoo.tiny("glm4-causal").double()
    settings: Any = {"rank_pattern": {"gate": 2}, "alpha_pattern": {"gate": 11.0}, "also_train": ()}
    petune.wrap(plain, r=3, targets=["gate", "up", "q"], dropout=p, kernels="off", **settings)
    zoo.stir(plain)
    some = zoo.tiny("glm4-causal").double()
    petune.wrap(some, r=3, targets=["up"], kernels="off", also_train=())
    zoo.stir(some)
    inputs = zoo.batch("glm4-causal")
    for model in (plain, some):
        fused, found = copied(model), []
        fuse_sites(fused, OPS)
        tuned = [one for one in fused.modules() if isinstance(one, TunedLinear)]
        assert of(fused, FusedLora) == tuned and tuned
        for one in (fused, model):
            attention.use(one)
            own_stacks(one, family_of(one))  # type: ignore[arg-type]  # it has one
            with drawing(Running(rows=torch.arange(len(inputs["input_ids"])) + 5, key=step_key(7, 3))):
                found.append(zoo.gradients(one.train(), inputs))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
        zoo.assert_same_gradients(found[0][1], found[1][1], 1e-6)
        with without_tuning(fused), without_tuning(model):
            torch.testing.assert_close(fused(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["t5-gated", "bart-seq2seq"])
def test_dropout_draws_the_masks_of_the_unfused_model(name: str, recompute: bool) -> None:
    changes = {"dropout_rate": 0.1} if name.startswith("t5") else {"dropout": 0.1, "activation_dropout": 0.1}
    found = []
    for model in pair(name, update_dropout=0.3, **changes):
        attention.use(model)
        for stack in own_stacks(model, family_of(model)).values():
            stack.recompute = recompute
        inputs = zoo.batch(name) | {"use_cache": False}
        with drawing(Running(rows=torch.arange(len(inputs["input_ids"])) + 5, key=step_key(7, 3))):
            found.append(zoo.gradients(model.train(), inputs))
    (loss, gradients), (expected, wanted) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    zoo.assert_same_gradients(gradients, wanted, 1e-5)
    with torch.no_grad():  # the test could not fail if nothing were dropped
        assert abs(float(model.eval()(**inputs).loss - loss)) > 1e-3


@pytest.mark.parametrize("name", ["t5-seq2seq", "bart-seq2seq"])
def test_the_models_own_checkpointing_repeats_dropout_without_a_key(name: str) -> None:
    found = []
    model, _ = pair(name, update_dropout=0.3)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(11)
        found.append(zoo.gradients(model.train(), zoo.batch(name) | {"use_cache": False}))
    (loss, gradients), (expected, wanted) = found
    torch.testing.assert_close(loss, expected)
    zoo.assert_same_gradients(gradients, wanted, 1e-9)


@pytest.mark.parametrize("name", ["t5-gated", "bart-seq2seq"])
def test_names_state_hooks_and_generation_survive_and_unfusing_restores_the_classes(name: str) -> None:
    fused, plain = pair(name, torch.float32)
    called: list[str] = []
    for module in of(fused, FusedLora):
        module.register_forward_hook(lambda module, args, output: called.append(type(module).__name__))
    assert list(fused.state_dict()) == list(plain.state_dict())
    asked = zoo.prompt(name) | zoo.GENERATE
    assert torch.equal(fused.generate(**asked), plain.generate(**asked))  # type: ignore[operator]
    assert set(called) == {"FusedLoraLinear"}
    again = copy.deepcopy(fused)
    unfuse_sites(fused)
    assert [type(module) for module in fused.modules()] == [type(module) for module in plain.modules()]
    assert of(again, FusedLora), "a copy is fused on its own"
    # T5 does not scale its scores: a sum in another order is a thousand times as far apart behind them
    assert_alike(again, fused, zoo.batch(name), 1e-2)


def test_merging_and_passing_by_see_a_tuned_layer() -> None:
    fused, plain = pair("t5-seq2seq", torch.float32)
    inputs = zoo.batch("t5-seq2seq")
    with without_tuning(fused), without_tuning(plain), torch.no_grad():
        torch.testing.assert_close(fused(**inputs).loss, plain(**inputs).loss)
    with torch.no_grad():
        before = plain(**inputs).loss
        merged = petune.merge(fused)
        torch.testing.assert_close(merged(**inputs).loss, before, rtol=1e-4, atol=1e-5)
    assert not of(merged, FusedLora)


def test_linears_over_a_quantised_base_keep_their_own_way_and_generate_alike() -> None:
    """Their products read the bits that the base is held in, in training and with a cache of keys."""
    name = "gemma4-causal"
    model = petune.wrap(tiny(name, intermediate_size=128), r=4, kernels="reference", base_dtype="nf4")
    stir(model, std=0.1)
    plain = copied(model)
    unfuse(plain)
    restore_dense(plain)
    (loss, found), (expected, wanted) = (gradients(one.train(), batch(name)) for one in (model, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted)
    ask = {"max_new_tokens": 4, "do_sample": False}
    ids = batch(name)["input_ids"][:1, :5]
    told = [one.eval().generate(ids, **ask, use_cache=cached) for one in (model, plain) for cached in (1, 0)]
    assert all(torch.equal(told[0], other) for other in told[1:])


def test_what_is_in_a_fused_block_is_left_to_it() -> None:
    model = zoo.tiny("llama-causal")
    petune.wrap(model, r=4, kernels="off")
    assert fuse(model, family_of(model), "reference")
    # `fuse` has seen to the norm behind the last block, the only one outside
    assert fuse_sites(model, OPS) == 0
    assert isinstance(model.model.norm, FusedNorm)


@pytest.mark.parametrize("name", ["t5-gated", "bart-seq2seq"])
def test_a_block_compiles_to_one_graph(name: str) -> None:
    fused, plain = pair(name, torch.float32)
    torch._dynamo.reset()
    # a sum of squares is constant behind a norm
    hidden, direction = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(4))
    found, code = [], []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        code.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)  # type: ignore[no-untyped-call]

    for model in (fused, plain):
        block = own_stacks(model, family_of(model))["encoder"].blocks[0]
        step = torch.compile(block, backend=backend, fullgraph=True) if model is fused else block
        x = hidden.clone().requires_grad_()
        output = step(x, attention_mask=None)
        (output[0] if isinstance(output, tuple) else output).mul(direction).sum().backward()
        found.append([x.grad, *(value.grad for value in block.parameters() if value.grad is not None)])
    sites = len(of(own_stacks(fused, family_of(fused))["encoder"].blocks[0], FusedLora))
    assert code[-1].count("petune.lora_linear") == sites > 5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * float(other.abs().max()))


@pytest.mark.long
def test_parts_of_one_linear_compile_to_one_graph_and_to_the_same_numbers() -> None:
    plain: Any = zoo.tiny("glm4-causal").double()
    petune.wrap(plain, r=3, targets=["up"], kernels="off", also_train=())
    zoo.stir(plain)
    plain = plain.model.layers[0].mlp.gate_up_proj
    fused, x = fused_copy(plain), torch.randn(2, 5, 64, dtype=torch.float64)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    (y, found), (expected, wanted) = run(cast("nn.Module", compiled), x), run(plain, x)
    assert_same((y, found[:1]), (expected, wanted[:1]))
    for name, value in plain.tuned().items():
        torch.testing.assert_close(fused.get_parameter(name).grad, value.grad)


def test_a_tuned_linear_keeps_its_input_once_and_little_else() -> None:
    def kept(module: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {value.untyped_storage().data_ptr() for value in module.parameters()}
        x = torch.randn(64, 32, dtype=torch.bfloat16).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = module(x * 1)
        assert y.requires_grad
        return sum(size for at, size in sizes.items() if at not in own)

    plain = layer(32, 32, dtype=torch.bfloat16)
    fused = fused_copy(plain)
    rows, factors = 64 * 32 * 2, 2 * 2 * 32 * 2
    assert kept(fused) == rows + 64 * 2 * 2 + factors
    assert kept(plain) == rows + 64 * 2 * 2  # what A gives


# ------------------------------------------------------------------ one linear


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 3, 2, 6), (0, 6), (2, 0, 6)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_shape(shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(bias=bias)
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(run(fused_copy(plain), x), run(plain, x))


def test_strided_and_transposed_inputs_and_expanded_gradients() -> None:
    plain = layer()
    fused = fused_copy(plain)
    for x in (torch.randn(4, 12, dtype=torch.float64)[:, ::2], torch.randn(6, 4, dtype=torch.float64).T):
        assert_same(run(fused, x), run(plain, x))
        assert torch.autograd.gradcheck(fused, x.detach().requires_grad_())
    fused(x).sum().backward()


def test_kernels_get_matrices_whose_last_dim_is_dense() -> None:
    asked: list[str] = []

    def strict(name: str) -> Any:
        def run(*args: Any) -> Any:
            asked.append(name)
            assert all(one.stride(-1) == 1 for one in args if isinstance(one, Tensor)) and args[0].dim() == 2
            return getattr(OPS, name)(*args)

        return run

    ops = replace(OPS, **{name: strict(name) for name in ("rms_norm", "rms_norm_backward", "drop")})
    model = nn.Sequential(T5LayerNorm(6).double(), layer(dropout=0.5)).train()
    fuse_sites(model, ops)
    model(torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True).mT).sum().backward()
    fuse_sites(norm := T5LayerNorm(6), ops)
    norm(torch.randn(6, 3).T).sum().backward()  # a gradient of one number, expanded
    assert set(asked) == {"rms_norm", "rms_norm_backward", "drop"}


def test_a_weight_and_a_bias_that_train_get_their_gradients() -> None:
    plain = layer().requires_grad_(True)
    x = torch.randn(4, 6, dtype=torch.float64)
    found = run(fused_copy(plain), x)
    assert all(value is not None for value in found[1])
    assert_same(found, run(plain, x))


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 3, 2, 6)], ids=str)
def test_dropout_by_index_in_every_shape_the_layer_can_have(shape: tuple[int, ...]) -> None:
    plain = layer(dropout=0.5).train()
    x, found = torch.randn(shape, dtype=torch.float64), []
    place: dict[str, Any] = {"token": 7, "feature": 3} if len(shape) < 4 else {}
    for module in (fused_copy(plain), plain):
        with drawing(Running(rows=torch.arange(shape[0]), key=step_key(1, 2), site="decoder.0", **place)):
            found.append(run(module, x))
    assert_same(found[0], found[1])


def test_a_row_and_a_column_slice_are_the_slices_of_the_whole() -> None:
    """What a plan makes of a layer: B and the outputs cut, or A and the inputs, with features numbered as the
    hooks around it say."""
    whole = layer(8, 6, dropout=0.4, bias=False).train()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def output(
        module: nn.Module, x: Tensor, feature: int = 0, token: int = 0
    ) -> tuple[Tensor, list[Tensor | None]]:
        with drawing(
            Running(rows=torch.arange(2), key=step_key(1, 2), site="encoder.1", feature=feature, token=token)
        ):
            return run(module, x)

    def cut(features: slice, outputs: slice) -> LoraLinear:
        part = copied(whole)
        part.weight = nn.Parameter(whole.weight[outputs, features].clone(), requires_grad=False)
        part.lora_A = nn.Parameter(whole.lora_A.detach()[:, features].clone())
        part.lora_B = nn.Parameter(whole.lora_B.detach()[outputs].clone())
        return part

    everything, expected = slice(None), output(whole, x)[0]
    rows, columns = [slice(0, 3), slice(3, 8)], [slice(0, 6), slice(6, 6)]
    for features in rows:
        part = cut(features, everything)
        assert_same(
            output(fused_copy(part), x[..., features], features.start),
            output(part, x[..., features], features.start),
        )
    partial = [
        output(fused_copy(cut(features, everything)), x[..., features], features.start)[0]
        for features in rows
    ]
    torch.testing.assert_close(sum(partial), expected)
    for outputs in columns:
        part = cut(everything, outputs)
        assert_same(output(fused_copy(part), x), output(part, x))
    torch.testing.assert_close(
        torch.cat([output(fused_copy(cut(everything, one)), x)[0] for one in columns], -1), expected
    )
    tokens = [
        output(fused_copy(whole), x[:, part], token=part.start)[0] for part in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(torch.cat(tokens, 1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_factors_on_a_half_precision_base_are_as_exact_as_the_layer(dtype: torch.dtype) -> None:
    plain = layer(64, 48, dtype=dtype)
    x = torch.randn(32, 64).to(dtype)
    (y, found), (z, expected) = run(fused_copy(plain), x), run(plain, x)
    oracle = run(copied(plain).double(), x.double())
    assert y.dtype == z.dtype == dtype
    for one, other, true in zip((y, *found), (z, *expected), (oracle[0], *oracle[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None and true is not None:
            assert one.dtype == other.dtype
            error, usual = ((value.double() - true).norm() / true.norm() for value in (one, other))
            assert error <= 1.5 * usual + torch.finfo(dtype).eps, (float(error), float(usual))


def test_under_autocast_it_computes_in_the_dtype_of_autocast() -> None:
    plain = layer(64, 48, dtype=torch.float32)
    fused = fused_copy(plain)
    x = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        (y, found), (z, expected) = run(fused, x), run(plain, x)
    assert y.dtype == z.dtype == torch.bfloat16
    for one, other in zip((y, *found), (z, *expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            torch.testing.assert_close(
                one.float(), other.float(), rtol=3e-2, atol=3e-2 * float(other.abs().max())
            )


def test_a_dtype_the_layer_refuses_is_refused_in_its_words() -> None:
    plain = layer(dtype=torch.float32)
    for module in (plain, fused_copy(plain)):
        with pytest.raises(RuntimeError, match="same dtype"):
            module(torch.randn(3, 6, dtype=torch.bfloat16))


def test_what_is_kept_may_not_be_changed_before_the_backward_pass() -> None:
    fused = fused_copy(layer())
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True) * 1
    y = fused(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------ norms


@pytest.mark.parametrize("kind", [T5LayerNorm, LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("trains", [True, False])
def test_an_rms_norm_of_any_leading_dims(kind: type[nn.Module], trains: bool) -> None:
    plain = kind(6).requires_grad_(trains)
    nn.init.normal_(plain.weight)  # type: ignore[arg-type]
    for shape in ((6,), (2, 6), (2, 3, 4, 6), (0, 6)):
        x = torch.randn(shape)
        assert_same(run(fused_copy(plain), x), run(plain, x), 1e-5)


@pytest.mark.parametrize("kind", [T5LayerNorm, LlamaRMSNorm, Gemma3RMSNorm])
def test_a_norm_of_another_dtype_than_its_input_keeps_its_own_way(kind: type[nn.Module]) -> None:
    plain = kind(6)
    x = torch.randn(3, 6).bfloat16()
    assert torch.equal(fused_copy(plain)(x), plain(x))


@pytest.mark.parametrize("trains", [True, False])
def test_a_norm_of_one_plus_weight_adds_them_in_float32(trains: bool) -> None:
    plain = Gemma3RMSNorm(64).bfloat16().requires_grad_(trains)
    nn.init.normal_(plain.weight, std=0.05)
    fused, x = fused_copy(plain), torch.randn(5, 64).bfloat16()
    assert isinstance(fused, FusedShiftedNorm) and torch.equal(fused(x), plain(x))
    assert_same(run(fused, x), run(plain, x), 2**-7)


def test_every_norm_of_a_gemma_is_fused_with_its_offset() -> None:
    model = zoo.tiny("gemma3-causal")
    fuse_sites(model, OPS)
    assert [type(norm).__mro__[1] for norm in of(model, FusedNorm)] == [FusedShiftedNorm] * (2 * 6 + 1)


def test_a_norm_that_only_looks_like_one_is_left_alone() -> None:
    class Shifted(T5LayerNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + hidden_states

    class Gated(T5LayerNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(hidden_states)

    assert (
        fuse_sites(
            nn.ModuleList([CohereLayerNorm(6), Shifted(6), Gated(6), nn.LayerNorm(6), nn.Linear(3, 3)]), OPS
        )
        == 0
    )


def test_settings_of_fused_blocks_are_refused_where_single_modules_are_fused() -> None:
    plain, memory = zoo.tiny("t5-seq2seq"), MemoryConfig(keep="input")
    petune.wrap(plain, r=4, targets="all-linear", kernels="off")
    with pytest.raises(
        UsageError, match=r"memory  no block of this \w+ can be fused\n.*found a plan cuts them"
    ):
        fuse_modules([plain], "reference", torch.device("cpu"), "a plan cuts them", memory)
    assert not any(isinstance(module, FusedSite) for module in plain.modules())


def test_what_is_said_of_blocks_that_are_not_fused_counts_their_fused_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.fuse.say", said.append)
    plain = zoo.tiny("t5-seq2seq")
    petune.wrap(plain, r=4, targets="all-linear", kernels="off")
    done = fuse_modules([plain], "reference", torch.device("cpu"), "a plan cuts them")
    fused = sum(isinstance(module, FusedSite) for module in plain.modules())
    assert done.sites == fused > 0
    assert said == [
        f"kernels: the model's own blocks run, with {fused} of their modules fused: a plan cuts them"
    ]
