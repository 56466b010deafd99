"""What methods and frozen forms compute, each by its paper's equation, on one layer or a tiny model: cheap
enough to be run twice for every fault that is planted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.methods import learning_rates, tune, tuned_parameters, wrap
from petune.methods.adapter import tune as bottleneck
from petune.methods.configs import AdapterConfig, LoraConfig
from petune.models.form import Form
from petune.recipe import load_recipe
from petune.run.state import make_optimizer
from tests.methods.references import stacks
from tests.methods.zoo import batch, stir, tiny


def _moved(layer: nn.Module, **settings: Any) -> Any:
    """The layer in float64 with LoRA, away from its start."""
    torch.manual_seed(0)
    model = nn.Sequential(layer).double()
    tuned = wrap(model, "lora", targets=["0"], also_train=(), **settings)
    stir(tuned, std=0.3)
    return tuned[0]


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def lora(rslora: bool, r: int = 4, alpha: float = 6) -> None:
    """y = W x + b + s B A x, s = alpha / r, or alpha / sqrt(r)."""
    layer = _moved(nn.Linear(10, 6), r=r, alpha=alpha, rslora=rslora)
    x, s = torch.randn(3, 10).double(), alpha / (r**0.5 if rslora else r)
    _same(layer(x), F.linear(x, layer.weight, layer.bias) + s * x @ layer.lora_A.T @ layer.lora_B.T)


def pissa() -> None:
    """s B A of the start is the nearest product of rank r to the weight, and the weight what it leaves."""
    torch.manual_seed(0)
    base = nn.Linear(10, 6).double()
    u, s, vh = torch.linalg.svd(base.weight.detach())
    best = u[:, :2] * s[:2] @ vh[:2]
    layer = wrap(nn.Sequential(base), r=2, alpha=6, init="pissa", targets=["0"], also_train=())[0]
    _same(3 * layer.lora_B @ layer.lora_A, best)
    _same(layer.weight, u[:, 2:] * s[2:] @ vh[2:6])


def convolution() -> None:
    """y = (W + s B A) * x with B A summed over ranks, place by place."""
    layer = _moved(nn.Conv2d(3, 5, (3, 2), stride=2, padding=1), r=2, alpha=6)
    x = torch.randn(2, 3, 7, 8).double()
    whole = layer.weight + 3 * torch.einsum("or,rcij->ocij", layer.lora_B[..., 0, 0], layer.lora_A)
    _same(layer(x), F.conv2d(x, whole, layer.bias, 2, 1))


def token_rows() -> None:
    """The model with those rows of its table and of its tied head changed, and no others."""
    model, plain = (tiny("llama-causal", tie_word_embeddings=True).double() for _ in range(2))
    inputs = {"input_ids": torch.tensor([[5, 7, 9, 11]])}
    wrap(model, r=2, token_rows=[5, 9], also_train=())
    (rows,) = {
        id(one): one for name, one in tuned_parameters(model).items() if name.endswith("rows")
    }.values()
    with torch.no_grad():
        rows += torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
        plain.get_input_embeddings().weight[[5, 9]] = rows
    _same(model(**inputs).logits, plain(**inputs).logits)


def biases() -> None:
    """Every bias trains where all are asked for, and has a gradient."""
    model, names = tiny("bert-classify"), {name for name, _ in tiny("bert-classify").named_parameters()}
    wrap(model, r=2, targets=["q"], bias="all", also_train=())
    own = {name: value for name, value in tuned_parameters(model).items() if "lora_" not in name}
    assert own.keys() == {name for name in names if name.endswith(".bias")}
    model(**batch("bert-classify")).loss.backward()
    assert all(value.requires_grad and value.grad is not None for value in own.values())


def lora_plus() -> None:
    """Every B learns `lr_ratio` times as fast as A."""
    method = {"name": "lora", "r": 2, "lr_ratio": 8, "also_train": []}
    recipe, model = (
        load_recipe({"model": "m", "data": "d", "lr": 1e-3, "method": method}),
        tiny("llama-causal"),
    )
    assert isinstance(recipe.method, LoraConfig)
    tune(model, recipe.method)
    own = tuned_parameters(model)
    groups = make_optimizer(recipe, own, learning_rates(model)).param_groups
    rates = {id(value): group["lr"] for group in groups for value in group["params"]}
    assert all(rates[id(value)] == (8e-3 if "lora_B" in name else 1e-3) for name, value in own.items())


def houlsby() -> None:
    """out = y + up(act(down(y))), y what the linear gives."""
    torch.manual_seed(0)
    layer: Any = bottleneck(nn.Linear(10, 8).double(), AdapterConfig(reduction=2, activation="relu"), "it")
    stir(layer, std=0.3)
    down, up, x = layer.adapter_down, layer.adapter_up, torch.randn(3, 10).double()
    y = F.linear(x, layer.weight, layer.bias)
    _same(layer(x), y + F.linear(F.relu(F.linear(y, down.weight, down.bias)), up.weight, up.bias))


def ladder_gate() -> None:
    """What enters a side block is g s + (1 - g) down(h), g = sigmoid(a / T)."""
    model: Any = wrap(tiny("llama-causal").double(), "side", reduction=4, temperature=0.5, also_train=())
    stir(model, std=0.3)
    ladder, seen = stacks(model)[0].side, dict[str, Tensor]()
    ladder.down[0].register_forward_hook(lambda one, given, made: seen.update(state=made))
    ladder.down[1].register_forward_hook(lambda one, given, made: seen.update(below=made))
    ladder.blocks[0].register_forward_pre_hook(
        lambda one, args, given: seen.update(found=args[0] if args else given["hidden_states"]),
        with_kwargs=True,
    )
    model(**batch("llama-causal"))
    g = torch.sigmoid(ladder.gates["0"] / 0.5)
    _same(seen["found"], g * seen["state"] + (1 - g) * seen["below"])


def held_in(form: type[Form]) -> None:
    """A weight comes back as near as half the widest step between two levels, times its row's or its block's
    largest magnitude; of NF4, whose scales are rounded too, a little further."""
    torch.manual_seed(0)
    weight = torch.randn(6, 128)
    if form.name != "nf4":
        weight[2] *= 50
    blocks = weight.view(6, -1, 64) if form.name == "nf4" else weight.view(6, 1, 128)
    step = 0.2 if form.name == "nf4" else 0.5 / 127 + 1e-5  # NF4's lowest two levels lie .304 apart
    error = (form.of(weight).dense().view(blocks.shape) - blocks).abs()
    assert bool((error <= step * blocks.abs().amax(-1, keepdim=True)).all())
