"""What methods add, held against their papers' equations in float64: for the tests of methods, and for those
that plant faults."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.kernels.block import node
from petune.kernels.configs import KernelsName
from petune.kernels.fuse import fused_blocks
from petune.methods import tuned_parameters, tuned_state, wrap
from petune.methods.configs import DoraConfig
from petune.methods.dora import DoraLinear
from petune.methods.ia3 import Ia3Linear
from petune.methods.pruning import fisher_of, weigh
from petune.models.fresh import draw_tuned
from petune.models.stack import Stack
from tests.methods.zoo import batch, stir, tiny

PARALLEL: dict[str, Any] = {"kind": "parallel", "reduction": 4, "activation": "relu", "also_train": ()}


def with_dora(layer: nn.Linear, **settings: Any) -> DoraLinear:
    """The layer with everything that trains moved from its start."""
    form = DoraLinear.around(layer, DoraConfig(**({"r": 3, "alpha": 5} | settings)))
    with torch.no_grad():
        for value in form.tuned().values():
            value += 0.3 * torch.randn_like(value)
    return form


def dora_follows_the_equation(bias: bool) -> None:
    """DoRA's forward and gradients, the norm a constant."""
    torch.manual_seed(0)
    layer = nn.Linear(10, 6, bias).double()
    form, x, upstream = (
        with_dora(layer),
        torch.randn(4, 7, 10).double().requires_grad_(),
        torch.randn(4, 7, 6).double(),
    )
    y = form(x)
    found = torch.autograd.grad((y * upstream).sum(), [x, *form.tuned().values()])
    m, turned = form.lora_magnitude_vector, layer.weight + 5 / 3 * form.lora_B @ form.lora_A
    own = x @ ((m / turned.norm(dim=1).detach())[:, None] * turned).T + (layer.bias if bias else 0)
    torch.testing.assert_close(y, own, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((own * upstream).sum(), [x, *form.tuned().values()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    form.merged, merged = True, nn.functional.linear(x, form.merged_weight(), layer.bias)
    torch.testing.assert_close(merged, own, rtol=1e-12, atol=1e-12)


def ia3_follows_the_equation(of_inputs: bool) -> None:
    """(IA)^3's forward and gradient."""
    torch.manual_seed(0)
    form, x = Ia3Linear.around(nn.Linear(5, 4).double(), of_inputs), torch.randn(3, 5).double()
    with torch.no_grad():
        form.ia3_l += torch.randn_like(form.ia3_l)
    scale = form.ia3_l.flatten()
    own = x * scale @ form.weight.T + form.bias if of_inputs else scale * (x @ form.weight.T + form.bias)
    torch.testing.assert_close(form(x), own)
    found, expected = (torch.autograd.grad(y.square().sum(), form.ia3_l) for y in (form(x), own))
    torch.testing.assert_close(found, expected)


def pfeiffers_adapters_follow_the_paper(
    name: str, places: list[str], kernels: KernelsName, near: float
) -> None:
    """MAD-X: an adapter reads what a block would give without it, and adds to the sum that the block ends
    with, before the norm behind that where there is one. Held against the base with hooks: the loss, every
    gradient, and three steps of AdamW. places: of the norms, or blocks, of both stacks."""
    settings: dict[str, Any] = {"kind": "pfeiffer", "reduction": 4, "activation": "relu", "also_train": ()}
    model = wrap(tiny(name).double(), "adapter", **settings, kernels=kernels).train()
    stir(model, std=0.1)
    own, twin = tuned_state(model), tiny(name).double().requires_grad_(False).train()
    for one in (model, twin) if name.startswith("qwen3moe") else ():
        one.set_experts_implementation("eager")  # whose other products are of no float64
    made = {key: value.detach().clone().requires_grad_() for key, value in own.items()}
    for place in places:
        keys = ("down.weight", "down.bias", "up.weight", "up.bias")
        parts = tuple(made[f"{place}.adapter_{key}"] for key in keys)
        twin.get_submodule(place).register_forward_hook(partial(_of_sum, parts))
    trained = tuned_parameters(model)
    assert len(made) == 4 * len(places) and trained.keys() == made.keys()
    stepping = [torch.optim.AdamW(one.values(), lr=0.01, eps=1e-4) for one in (trained, made)]
    for step in range(3):
        inputs = batch(name, seed=step)
        losses = [one(**inputs).loss.double() for one in (model, twin)]
        torch.testing.assert_close(losses[0], losses[1], rtol=near, atol=0)
        for loss, optimizer in zip(losses, stepping, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for key, value in trained.items():
            grad, expected = cast("Tensor", value.grad), cast("Tensor", made[key].grad)
            torch.testing.assert_close(grad, expected, rtol=near, atol=near * float(expected.abs().max()))
        for optimizer in stepping:
            optimizer.step()
        for key, value in trained.items():
            torch.testing.assert_close(value, made[key], rtol=0, atol=near)


# dropout of the base alone, by the family: the head's own would draw other masks in another order
DROPS = {"bert": {"hidden_dropout_prob": 0.5, "classifier_dropout": 0.0}, "llama": {"attention_dropout": 0.5}}


def probed(name: str, **settings: Any) -> Any:
    """A model of the zoo under method head, in training mode."""
    return wrap(tiny(name, **DROPS.get(name.partition("-")[0], {})), "head", **settings).train()


def adamw_steps(model: Any, name: str, number: int = 3) -> list[Tensor]:
    """The losses of AdamW's steps over what trains, on two batches in turns."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for step in range(number):
        loss = model(**batch(name, seed=step % 2)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def head_trains_behind_a_base_without_gradients(name: str, kernels: KernelsName) -> None:
    """Three steps of Hugging Face's model without dropout, whose base is frozen, against ours with it."""
    model, twin = probed(name, kernels=kernels), tiny(name).train()
    trained = tuned_parameters(model)
    for own, value in twin.named_parameters():
        value.requires_grad_(own in trained)
    assert trained and not any(own.startswith(f"{twin.base_model_prefix}.") for own in trained)
    losses = adamw_steps(model, name), adamw_steps(twin, name)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for own, value in twin.named_parameters():
        found = model.get_parameter(own)
        assert found.requires_grad is (own in trained)
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)


def blocks_below_a_head_make_no_node() -> None:
    """Fused blocks run forward only in training, none handed a cache of keys and values."""
    model, nodes = probed("llama-classify", kernels="reference"), list[Any]()
    apply = node.Node.apply
    try:
        node.Node.apply = lambda *args: nodes.append(args) or apply(*args)  # type: ignore[method-assign,func-returns-value]  # a spy
        adamw_steps(model, "llama-classify", 1)
    finally:
        node.Node.apply = apply  # type: ignore[method-assign]  # and away
    assert fused_blocks(model) and not nodes
    assert model(**batch("llama-classify")).past_key_values is None


def _of_sum(parts: tuple[Tensor, ...], module: nn.Module, args: Any, output: Any) -> Any:
    """What a norm, or a block, gives with an adapter of these parts."""
    down, down_bias, up, up_bias = parts
    normed = output[0] if isinstance(output, tuple) else output
    update = F.relu(normed @ down.T + down_bias) @ up.T + up_bias
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(args[0] + update, module.normalized_shape, module.weight, module.bias, module.eps)
    return (normed + update, *output[1:]) if isinstance(output, tuple) else normed + update


def _beside(x: torch.Tensor, made: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Equation 5 of He et al. 2022, with biases: s f(x W_down) W_up."""
    low = F.relu(x @ made["adapter_down.weight"].T + made["adapter_down.bias"])
    return scale * (low @ made["adapter_up.weight"].T + made["adapter_up.bias"])


def parallel_adapters_follow_the_paper(name: str, given: dict[str, float], scale: float) -> None:
    """h <- MLP(x) + s f(x W_down) W_up, x being what the block adds it to (after attention)."""
    model = wrap(tiny(name).double(), "adapter", **PARALLEL, **given)
    stir(model, std=0.1)
    base = model.get_submodule(getattr(model, "base_model_prefix", ""))
    block = base.encoder.layer[0] if name == "bert-classify" else base.layers[0]
    site = block.output.dense if name == "bert-classify" else block.mlp.down_proj
    twin = {key: value.detach().clone().requires_grad_() for key, value in site.tuned().items()}
    torch.manual_seed(2)
    x, upstream = torch.randn(2, 2, 5, 64, dtype=torch.float64)
    if name == "bert-classify":
        inner = F.gelu(x @ block.intermediate.dense.weight.T + block.intermediate.dense.bias)
        y = inner @ site.weight.T + site.bias
        norm = block.output.LayerNorm
        expected = F.layer_norm(y + _beside(x, twin, scale) + x, (64,), norm.weight, norm.bias, norm.eps)
        found = block.feed_forward_chunk(x)
    else:
        normed = block.post_attention_layernorm(x)
        inner = F.silu(normed @ block.mlp.gate_proj.weight.T) * (normed @ block.mlp.up_proj.weight.T)
        expected = inner @ site.weight.T + _beside(x, twin, scale)
        found = block.mlp(normed)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for key, value in site.tuned().items():
        torch.testing.assert_close(value.grad, twin[key].grad, rtol=1e-12, atol=1e-12)


def most(importance: Tensor, count: int) -> list[int]:
    """The places of the greatest, in their order."""
    order = sorted(range(len(importance)), key=lambda place: -float(importance[place].detach()))
    return sorted(order[:count])


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def fisher_by_hand(base: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over rows of the squared gradient of log p of their tags, by name, in float64."""
    found = {name: torch.zeros_like(value) for name, value in base.named_parameters()}
    rows = len(inputs["labels"])
    for row in range(rows):
        base.zero_grad()
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        tags = own.pop("labels")[0]
        chances = base(**own).logits[0].softmax(-1)
        sum(chances[at, tag].log() for at, tag in enumerate(tags) if tag >= 0).backward()
        for name, value in base.named_parameters():
            found[name] += 0 if value.grad is None else value.grad**2 / rows
    return found


def pruned_start_follows_the_paper(start: str = "pruned") -> None:
    """Rows by sum_j |W_ij|, or by the sum of their Fisher information, columns by the rows that the weight
    before has kept; by loops, for BERT and 2 of its 8 features of each head, 8 heads."""
    base, tuned = tiny("bert-tokens").double().eval(), tiny("bert-tokens").double().eval()
    matters = {name: value.abs() for name, value in base.named_parameters()}
    if start == "fisher":
        inputs = batch("bert-tokens")
        matters = fisher_by_hand(base, inputs)
        rows_of = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(3)]
        losses = (tuned(**row).loss * (row["labels"] >= 0).sum() for row in rows_of)
        weigh(tuned, fisher_of(tuned, losses))
    model = wrap(tuned, "side", reduction=4, start=start, also_train=())
    narrow, heads, wide = 16, 8, 8
    stream = most(matters["bert.embeddings.word_embeddings.weight"].sum(0), narrow)
    for index, block in enumerate(base.bert.encoder.layer):
        own = dict(block.named_parameters())
        matter = {name: matters[f"bert.encoder.layer.{index}.{name}"] for name in own}
        side = dict(stacks(model)[0].side.blocks[index].named_parameters())
        expected: dict[str, Tensor] = {}
        at = [f"attention.self.{name}" for name in ("query", "key", "value")]
        product = torch.ones(64, narrow, dtype=torch.float64)
        for path in at:
            product = product * matter[f"{path}.weight"][:, stream]
        rows: list[int] = []
        for head in range(heads):
            first = head * wide
            rows += [first + place for place in most(product[first : first + wide].sum(1), wide // 4)]
        for path in at:
            expected[f"{path}.weight"] = own[f"{path}.weight"][rows][:, stream]
            expected[f"{path}.bias"] = own[f"{path}.bias"][rows]
        for path, norm in (
            ("attention.output.dense", "attention.output.LayerNorm"),
            ("intermediate.dense", None),
            ("output.dense", "output.LayerNorm"),
        ):
            inner = rows if norm else stream
            weight = own[f"{path}.weight"][:, inner]
            rows = most(matter[f"{path}.weight"][:, inner].sum(1), len(weight) // 4)
            expected[f"{path}.weight"], expected[f"{path}.bias"] = weight[rows], own[f"{path}.bias"][rows]
            if norm:
                stream = rows
                for leaf in ("weight", "bias"):
                    expected[f"{norm}.{leaf}"] = own[f"{norm}.{leaf}"][rows]
        assert side.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(side[name], value), name


def drawing_anew_leaves_what_was_pruned() -> None:
    """What a ladder's blocks began as stays; the rest is drawn."""
    model = wrap(tiny("t5-seq2seq"), "side", reduction=4, start="pruned", end="paper")
    before = {name: value.clone() for name, value in tuned_state(model).items()}
    draw_tuned(model, 5)
    same = {name for name, value in tuned_state(model).items() if torch.equal(value, before[name])}
    pruned = {name for name in before if ".side.blocks." in name or ".side.norm." in name}
    assert pruned <= same
    assert not any(".down." in name or name.endswith("up.weight") for name in same)
