"""How exact fused training is: which share of an update survives rounding at each site, losses over steps,
and the first gradients.

    PYTHONPATH=. python3 benchmarks/exact.py survival            on the device there is; --tiny on a CPU
    PYTHONPATH=. python3 benchmarks/exact.py losses              50 steps of four blocks of the 8B shape, LoRA
                                                                 r=16
    PYTHONPATH=.:SITE python3 benchmarks/exact.py losses --layers 2 --steps 200 --rank 64 --variants float32
    petune peft unsloth
    PYTHONPATH=. python3 benchmarks/exact.py losses --shape 70b --layers 8 --steps 200 --variants petune
    "petune, nf4 base"                                           beside the first, a base in bf16
    PYTHONPATH=. python3 benchmarks/exact.py losses --shape moe --variants float32 petune "petune, kernels:
    off"                                                         four blocks of Qwen3-30B-A3B's shape
    PYTHONPATH=. python benchmarks/exact.py losses --tiny --layers 2 --steps 200 --plot exact.svg         on a
                                                                                                          CPU

Survival: y is the first rounded tensor behind a site, y(0) without its update and y(B) with it, u the update
of y in float64 and small:
|u| / |y| = 4e-4. The share is <y(B) - y(0), u> / <u, u>, the mean of 8 seeds: 1 where nothing is lost, 0
where all of it is rounded away. A length, of DoRA, is changed by as much.

Losses: the same weights, tokens (a small set of sequences, so that there is something to learn) and factors
in every variant, LoRA on all projections, AdamW at 2e-4. A variant has a process of its own and is printed
when it is done; losses go to exact.jsonl in $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

if sys.argv[-1].startswith('{"variant": "unsloth"'):
    import unsloth  # type: ignore[import-not-found] # noqa: F401  # has to come before transformers

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import petune
from benchmarks.peers import SHAPES, TARGETS, answer, in_own_process, prepare
from petune.kernels import reference
from petune.kernels.block.call import Draws
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.packed_linear import Group, spans
from petune.kernels.dispatch import Ops, reference_ops, select
from petune.kernels.fuse import fused_blocks
from petune.kernels.single_modules import fuse_sites
from petune.methods.configs import LoraConfig
from petune.methods.lora import tune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, TOKENS, BATCHES = 2, 1024, 8  # tokens of a row: an eighth of it on a CPU
SMALL = 4e-4  # |u| / |y|
SEEDS = 8
SIZES = {"8b": (4096, 14336, 32), "tiny": (256, 512, 4)}  # width, columns of the MLP, heads

# ------------------------------------------------------------------ what survives of an update

Site = Callable[[Tensor | None], Tensor]  # factors b [n, r], None for zero, to the first rounded tensor


def share(site: Site, b: Tensor, change: Tensor) -> float:
    """<y(b) - y(0), u> / <u, u>; change: u, float64."""
    moved = site(b).double() - site(None).double()
    return float((moved * change).sum() / change.square().sum())


def small(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(b of an update that is `SMALL` beside the layer's result, that result, the update), the last two in
    float64."""
    y = reference.wide(x).double() @ weight.double().T + (0.0 if bias is None else bias.double())
    b = (b * (SMALL * y.norm() / (x.double() @ a.double().T @ b.double().T).norm())).to(x.dtype)
    return b, y, (x @ a.T).double() @ b.double().T


def block_of(
    kind: str, size: str, rank: int, device: str, kernels: str, act: str = "gelu", method: str = "lora"
) -> FusedBlock:
    """One fused block in bf16 with updates at every site; act: of BERT's."""
    width, columns, heads = SIZES[size]
    model: nn.Module
    if kind == "llama":
        config = SHAPES["8b"] | {
            "num_hidden_layers": 1,
            "vocab_size": 64,
            "hidden_size": width,
            "intermediate_size": columns,
        }
        config |= {
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4,
            "head_dim": width // heads,
        }
        model = LlamaForCausalLM(LlamaConfig(**config))
    else:
        sizes = {
            "hidden_size": width,
            "intermediate_size": columns,
            "num_attention_heads": heads,
            "num_hidden_layers": 1,
        }
        model = BertModel(BertConfig(**sizes, vocab_size=64, hidden_act=act))  # biases are drawn below
    model = model.to(device, torch.bfloat16)
    petune.wrap(model, method=cast("Any", method), r=rank, kernels=cast("Any", kernels))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    return cast("FusedBlock", fused_blocks(model)[0])


def groups_of(block: FusedBlock) -> list[Group]:
    """The block's groups as a call makes them."""
    parts = block.parts()
    call = block.call(parts, (), Draws.nothing(parts, block.spec.program), None)
    return call.groups(block.tensors(parts))


@torch.no_grad()
def of_group(block: FusedBlock, at: int, seed: int) -> dict[str, float]:
    """The shares that survive at the sites of one group of a block, gate and up behind the activation if that
    adds their update."""
    group = groups_of(block)[at]
    torch.manual_seed(seed)
    weight = torch.cat([part.weight for part in group.parts])
    bias = (
        None
        if group.parts[0].bias is None
        else torch.cat([cast("Tensor", part.bias) for part in group.parts])
    )
    x = torch.randn(512, weight.shape[1], device=weight.device, dtype=weight.dtype)
    drawn = torch.zeros(len(weight), sum(group.ranks), device=weight.device)
    for rows, ranks in zip(spans(group.widths), spans(group.ranks), strict=True):
        drawn[rows, ranks] = torch.randn(
            rows.stop - rows.start, ranks.stop - ranks.start, device=weight.device
        )
    b, y, change = small(x, weight, bias, group.a, drawn)

    def site(b: Tensor | None) -> Tensor:
        group.b = torch.zeros_like(group.b) if b is None else b
        h, inlet = group.inlet(x)
        s = group.low(h.copy_(x))
        out = group.product(h, s, inlet)
        if not group.defers:
            return out
        return _behind(block, group, out, s)

    if group.defers:
        act = partial(reference.activate, act=block.spec.program.sizes.act, gated=block.spec.program.gated)
        return {
            "gate | up" if block.spec.program.gated else "up": share(site, b, act(y + change)[0] - act(y)[0])
        }
    rows = dict(zip(_NAMES[at][-len(group.widths) :], spans(group.widths), strict=True))
    return {name: share(lambda b, own=own: site(b)[:, own], b, change[:, own]) for name, own in rows.items()}  # type: ignore[misc]


_NAMES = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


def _behind(block: FusedBlock, group: Group, out: Tensor, s: Tensor | None) -> Tensor:
    """What the activation makes of gate | up."""
    sizes, gated = block.spec.program.sizes, block.spec.program.gated
    given = out, sizes.act, gated, group.deferred(s), None, group.paired
    return cast("Tensor", block.spec.ops.activate(*given, scale=group.deferred_scale)[0])


@torch.no_grad()
def of_lengths(block: FusedBlock, at: int, seed: int) -> dict[str, float]:
    """The shares that survive of a change of lengths, of `SMALL` in the mean, at the sites of one group of a
    block of DoRA's where nothing else is tuned yet; gate and up behind the activation if that scales them."""
    group, names = groups_of(block)[at], _NAMES[at]
    torch.manual_seed(seed)
    weight = torch.cat([part.weight for part in group.parts])
    x = torch.randn(512, weight.shape[1], device=weight.device, dtype=weight.dtype)
    longer = SMALL * torch.randn(len(weight), device=weight.device)
    y = x.double() @ weight.double().T
    change = longer.double() * y
    if group.parts[0].bias is not None:
        y += torch.cat([cast("Tensor", part.bias) for part in group.parts])

    def site(longer: Tensor | None) -> Tensor:
        longer = torch.zeros(len(weight), device=weight.device) if longer is None else longer
        pieces = zip(group.parts, (1 + longer).split(group.widths), strict=True)
        parts = [part._replace(by=cast("Tensor", part.by) * own) for part, own in pieces]
        own = Group(parts, x.dtype, 0, block.spec.ops, group.whole, gates=not group.scales)
        out, s = own(x)
        return out if own.scales else _behind(block, own, out, s)

    if not group.scales:
        act = partial(reference.activate, act=block.spec.program.sizes.act, gated=block.spec.program.gated)
        moved = act(y + change)[0] - act(y)[0]
        return {" | ".join(names[-len(group.widths) :]): share(site, longer, moved)}
    rows = dict(zip(names[-len(group.widths) :], spans(group.widths), strict=True))
    return {
        name: share(lambda by, own=own: site(by)[:, own], longer, change[:, own])
        for name, own in rows.items()
    }  # type: ignore[misc]


@torch.no_grad()
def of_site(ops: Ops | None, size: str, rank: int, device: str, seed: int, bias: bool = True) -> float:
    """The share that survives at a tuned linear by itself, fused (T5, BART, layers that a plan cuts) or,
    without `ops`, not."""
    torch.manual_seed(seed)
    width, columns, _ = SIZES[size]
    base = nn.Linear(width, columns, bias, device=device, dtype=torch.bfloat16).requires_grad_(False)
    layer = cast("Any", tune(base, LoraConfig(r=rank)))
    x = torch.randn(512, width, device=device, dtype=torch.bfloat16)
    a = (layer.lora_A * layer.scale).to(x.dtype)
    b, _, change = small(x, base.weight, base.bias, a, torch.randn_like(layer.lora_B))
    if ops is not None:
        fuse_sites(holder := nn.ModuleList([layer]), ops)
        layer = holder[0]

    def site(b: Tensor | None) -> Tensor:
        with torch.no_grad():
            layer.lora_B.copy_(torch.zeros_like(layer.lora_B) if b is None else b)
            return cast("Tensor", layer(x))

    return share(site, b, change)


def survival(
    size: str, ranks: tuple[int, ...], device: str, seeds: int = SEEDS
) -> Iterator[tuple[str, int, float]]:
    """(site, rank, mean share) of every site: blocks of Llama and BERT, a linear by itself, one that is not
    fused."""
    kernels = "reference" if device == "cpu" else "triton"
    ops = select(cast("Any", kernels), torch.device(device), torch.bfloat16) or reference_ops()
    for rank in ranks:
        for kind in ("llama", "bert"):
            block = block_of(kind, size, rank, device, kernels)
            for at in range(len(_NAMES)):
                found = [of_group(block, at, seed) for seed in range(seeds)]
                for name in found[0]:
                    yield f"{kind} {name}", rank, statistics.mean(one[name] for one in found)
        for name, used, bias in (
            ("linear", ops, False),
            ("linear with a bias", ops, True),
            ("kernels: off", None, True),
        ):
            yield (
                name,
                rank,
                statistics.mean(of_site(used, size, rank, device, seed, bias) for seed in range(seeds)),
            )


def surviving_lengths(size: str, device: str, seeds: int = SEEDS) -> Iterator[tuple[str, float]]:
    """(site, mean share) of a change of DoRA's lengths at every site of blocks of Llama and BERT."""
    kernels = "reference" if device == "cpu" else "triton"
    for kind in ("llama", "bert"):
        block = block_of(kind, size, 16, device, kernels, method="dora")
        for at in range(len(_NAMES)):
            found = [of_lengths(block, at, seed) for seed in range(seeds)]
            for name in found[0]:
                yield f"{kind} {name}", statistics.mean(one[name] for one in found)


# ------------------------------------------------------------------ losses


def build(variant: str, rank: int, seed: int, folder: Path) -> nn.Module:
    """The tuned model of a variant on the device; the same numbers for all, factors too."""
    if variant == "unsloth":
        return _unsloth(rank, seed, folder)
    dtype = torch.float32 if variant == "float32" else torch.bfloat16
    model = cast("nn.Module", AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)).to(DEVICE)
    if variant == "peft":
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        model = get_peft_model(model, PeftConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))
    else:
        settings = VARIANTS[variant]
        if DEVICE == "cpu" and settings["kernels"] == "triton":
            settings = settings | {"kernels": "reference"}
        petune.wrap(model, r=rank, **settings)
    _draw(model, seed)
    return model.train()


def _unsloth(rank: int, seed: int, folder: Path) -> nn.Module:
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=TOKENS, dtype=torch.bfloat16, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model, r=rank, lora_alpha=2 * rank, lora_dropout=0, target_modules=TARGETS, bias="none"
    )
    _draw(model, seed)
    return cast("nn.Module", model).train()


def _draw(model: nn.Module, seed: int) -> None:
    """Factors A from one generator in the order of blocks and roles, B = 0; float32."""
    generator = torch.Generator(DEVICE).manual_seed(2 * seed + 1)
    factors = {
        name.replace(".default", "").removeprefix("base_model.model."): value
        for name, value in model.named_parameters()
    }
    for name in sorted(name for name in factors if "lora_A" in name):
        value = factors[name]
        bound = value.shape[-1] ** -0.5  # of experts [experts, r, in]
        value.data = torch.empty(value.shape, device=DEVICE).uniform_(-bound, bound, generator=generator)
    for name in (name for name in factors if "lora_B" in name):
        factors[name].data = torch.zeros(factors[name].shape, device=DEVICE)


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"kernels": "off"},
    "petune": {"kernels": "triton"},
    "petune, input kept": {"kernels": "triton", "memory": {"keep": "input", "offload": "input"}},
    "petune, kernels: off": {"kernels": "off"},
    **{f"petune, {base} base": {"kernels": "triton", "base_dtype": base} for base in ("fp8", "int8", "nf4")},
}
# what a shape has beside the 8B's
BESIDE: dict[str, dict[str, Any]] = {
    "8b": {},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "vocab_size": 2000}
# Qwen3-30B-A3B's
MIXTURE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
}
TINY_MIXTURE = {"hidden_size": 256, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
TINY_MIXTURE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2000}


def write_mixture(layers: int, tiny: bool, folder: Path) -> None:
    """Random weights of a mixture of experts, in bf16."""
    config = Qwen3MoeConfig(**MIXTURE | (TINY_MIXTURE if tiny else {}), num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        Qwen3MoeForCausalLM(config).save_pretrained(folder)


def train(model: nn.Module, exact: bool, steps: int, seed: int) -> tuple[list[float], Tensor]:
    """Losses of every step, and the gradients of a second pass at the start, when B is no longer zero, as one
    vector."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.0, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(2 * seed + 2)
    data = torch.randint(
        4,
        2000,
        (BATCHES, ROWS, TOKENS if DEVICE == "cuda" else TOKENS // 8),
        device=DEVICE,
        generator=generator,
    )
    losses, gradient = [], torch.empty(0)
    for step in range(steps):
        ids = data[step % BATCHES]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=not exact):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 1:
            gradient = torch.cat(
                [value.grad.float().flatten() for value in parameters if value.grad is not None]
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    return losses, gradient


def worker(request: Mapping[str, Any]) -> dict[str, Any]:
    """One variant in a process of its own: its losses, and its gradients in a file."""
    variant, folder = request["variant"], Path(request["folder"])
    model = build(variant, request["rank"], request["seed"], folder)
    losses, gradient = train(model, variant == "float32", request["steps"], request["seed"])
    save_file({"gradient": gradient.cpu()}, folder.with_name(f"{variant}.safetensors"))
    return {"variant": variant, "rank": request["rank"], "seed": request["seed"], "losses": losses}


def compare(given: argparse.Namespace) -> None:
    """Train every variant, each in its own process, and print how far it is from float32."""
    names = given.variants or ["float32", "petune", "petune, kernels: off", "peft"]
    out = Path(os.environ.get("OUT", "."))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        if given.shape == "moe":
            write_mixture(given.layers, given.tiny, folder)
        else:
            SHAPES["exact"] = SHAPES["8b"] | {"num_hidden_layers": given.layers, "vocab_size": 32000}
            SHAPES["exact"] |= BESIDE[given.shape] | (TINY if given.tiny else {})
            prepare("exact", folder, DEVICE)
        torch.set_default_dtype(torch.float32)
        rows: list[dict[str, Any]] = []
        for name in names:
            request = {
                "variant": name,
                "rank": given.rank,
                "seed": given.seed,
                "steps": given.steps,
                "folder": str(folder),
            }
            rows.append(in_own_process(__file__, request, 600) | {"variant": name})
            with (out / "exact.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            _print(rows, folder)
    if given.plot:
        plot([row for row in rows if "losses" in row], out / given.plot)


def _print(rows: list[dict[str, Any]], folder: Path) -> None:
    """The last of `rows` beside the first."""
    row, exact = rows[-1], rows[0]["losses"]
    if "losses" not in row:
        print(f"{row['variant']:24} {row.get('error')}", flush=True)
        return
    found, wanted = (
        load_file(folder.with_name(f"{one['variant']}.safetensors"))["gradient"].double()
        for one in (row, rows[0])
    )
    cosine = (
        float(nn.functional.cosine_similarity(found, wanted, dim=0))
        if found.shape == wanted.shape
        else float("nan")
    )
    apart = [abs(a - b) for a, b in zip(row["losses"], exact, strict=True)]
    again = (
        f"again (step {2 * BATCHES + 1}) {row['losses'][2 * BATCHES]:.5f}" if len(exact) > 2 * BATCHES else ""
    )
    shown = f"{row['variant']:24} first {row['losses'][0]:.5f} {again} last {row['losses'][-1]:.5f}"
    print(
        f"{shown}, mean |difference| {statistics.mean(apart):.2e}, largest {max(apart):.2e}, gradient cosine"
        f" {cosine:.6f}",
        flush=True,
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """|loss - the first's| by step, averaged over a turn of the batches, as SVG."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    exact = rows[0]["losses"]
    for row in rows[1:]:
        apart = torch.tensor([abs(a - b) for a, b in zip(row["losses"], exact, strict=True)])
        turns = apart[: len(apart) // BATCHES * BATCHES].view(-1, BATCHES).mean(1)
        axes.plot(range(BATCHES, BATCHES * len(turns) + 1, BATCHES), turns, label=row["variant"])
    axes.set(
        xlabel="step",
        ylabel=f"|loss - loss of {rows[0]['variant']}|",
        yscale="log",
        title=f"LoRA r={rows[0]['rank']}, beside {rows[0]['variant']}",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Read the words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("survival", "losses"), default="losses")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=(*BESIDE, "moe"), default="8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of factors and rows")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a CPU")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*VARIANTS, "peft", "unsloth"),
        help="the first is what others are held against",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the differences (matplotlib)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        answer(worker(json.loads(given.worker)))
    elif given.what == "survival":
        for name, rank, found in survival("tiny" if given.tiny else "8b", (16, 40, 64, 256), DEVICE):
            print(f"{name:20} r={rank:<4} {found:.4f}", flush=True)
        for name, found in surviving_lengths("tiny" if given.tiny else "8b", DEVICE):
            print(f"{name:20} length {found:.4f}", flush=True)
    else:
        compare(given)


if __name__ == "__main__":
    main()
