"""Measuring a recipe's step: the FLOP that are counted, what is asked for and refused; and the benchmarks
beside peers on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bert_peers, ceiling, peers
from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.kernels.memory.shape import BlockShape
from petune.kernels.memory.shaped_program import of_shape, remade
from petune.profiling.flops import FORMULAS
from petune.profiling.throughput import (
    ALL,
    CHECKPOINT,
    Again,
    Case,
    Flops,
    Measured,
    cases,
    draw,
    flops_of,
    measure,
)
from petune.recipe import Recipe
from petune.tasks import Example
from tests.kernels.shapes import DECODER, sublayers
from tests.methods.zoo import tiny
from tests.small_runs import settings, write_model
from tests.written_recipes import recipe_of, sketched

ROOT = Path(__file__).parents[2]
MATMULS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm}


def example(tokens: int, **changes: Any) -> Example:
    """A causal row of `tokens` tokens, or of several packed rows."""
    labels = [-100, *range(1, tokens)]
    return replace(Example(list(range(tokens)), labels, "row", tokens), **changes)


def counted(name: str, folder: Path, **changes: Any) -> Flops:
    """How the FLOP of a zoo model are counted."""
    found = flops_of(sketched(recipe_of(name, folder, **changes)))
    assert found is not None
    return found


def dispatched(model: Any, tokens: int) -> int:
    """FLOP of the matrix products torch dispatches in a step of the blocks, attention's own left out, the
    input needing a gradient."""
    hidden = torch.randn(1, tokens, 64, requires_grad=True)
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with counter:
        model(inputs_embeds=hidden).last_hidden_state.sum().backward()
    return sum(count for kind, count in counter.get_flop_counts()["Global"].items() if kind in MATMULS)


# ------------------------------------------------------------------ FLOP


def without_attention(flops: Flops) -> Flops:
    """The same for linears alone."""
    return Flops(tuple(replace(one, width=0) for one in flops.linears), 0, False)


def test_full_fine_tuning_is_six_flop_a_weight_and_token(tmp_path: Path) -> None:
    model = tiny("llama-causal")
    found = without_attention(counted("llama-causal", tmp_path, method="full")).model(example(9))
    blocks = sum(value.numel() for value in model.model.layers.parameters() if value.dim() == 2)
    assert found == 6 * blocks * 9 == dispatched(model.model, 9)


def test_lora_is_four_flop_a_weight_and_its_own_are_only_executed(tmp_path: Path) -> None:
    from petune.methods import wrap

    flops = without_attention(
        counted("llama-causal", tmp_path, method={"name": "lora", "r": 4, "targets": "all-linear"})
    )
    model = wrap(tiny("llama-causal"), "lora", r=4, targets="all-linear", kernels="off")
    blocks = sum(one.weights for one in flops.linears)
    keeps_all = {(one.stack, one.block): ALL for one in flops.linears}
    assert flops.model(example(9)) == 4 * blocks * 9
    assert flops.executed(example(9), keeps_all) == dispatched(model.model, 9)


def test_attention_is_quadratic_halved_by_a_causal_mask_and_ends_with_a_packed_row(tmp_path: Path) -> None:
    def attention(name: str, row: Example) -> float:
        flops = counted(name, tmp_path)
        return flops.model(row) - replace(without_attention(flops), head=flops.head).model(row)

    layers, width = 2, 64
    assert attention("bert-classify", example(8, labels=0)) == 3 * layers * 4 * width * 8 * 8
    assert attention("llama-causal", example(8)) == 3 * layers * 4 * width * 8 * 8 / 2
    # whose weights lie the other way
    assert attention("gpt2-causal", example(8)) == attention("llama-causal", example(8))
    packed = example(8, positions=[0, 1, 2, 0, 1, 2, 3, 4])
    assert attention("llama-causal", packed) == 3 * layers * 4 * width * (9 + 25) / 2


def test_a_state_costs_alike_at_every_token(tmp_path: Path) -> None:
    """One block has it, the other attention with scores."""
    flops = counted("qwen3_5-causal", tmp_path)
    found = flops.model(example(8)) - replace(without_attention(flops), head=flops.head).model(example(8))
    heads, keys, values = 4, 8, 12
    assert found == 3 * (6 * heads * keys * values * 8 + 4 * (8 * 16) * 8 * 8 / 2)


def test_the_head_counts_trained_tokens_and_a_classifiers_does_not(tmp_path: Path) -> None:
    flops = counted("llama-causal", tmp_path)
    assert flops.head == tiny("llama-causal").lm_head.weight.numel()
    two = example(8, labels=[-100] * 6 + [1, 2])
    assert flops.model(example(8)) - flops.model(two) == 2 * flops.head * 2 * 5
    assert counted("llama-causal", tmp_path, method="full").head_trained
    assert counted("bert-classify", tmp_path).head == 0


def test_cross_attention_reads_the_encoder(tmp_path: Path) -> None:
    flops = counted("t5-seq2seq", tmp_path)
    keys = [one for one in flops.linears if one.cross and one.role == "k"]
    assert keys and all(one.source == "encoder" for one in keys)
    row = example(8, labels=[1, 2, 3])
    longer = example(8, labels=[1, 2, 3, 4])
    per_target = sum(2 * one.weights * 2 for one in flops.linears if one.source == "decoder")
    quadratic = sum(
        3 * 4 * one.width * (8 if one.cross else 3.5) for one in flops.linears if one.stack == "decoder"
    )
    assert flops.model(longer) - flops.model(row) == per_target + quadratic + 4 * flops.head


def test_blocks_the_gradient_does_not_reach_cost_one_pass(tmp_path: Path) -> None:
    side = counted("llama-causal", tmp_path, method={"name": "side", "reduction": 4})
    assert not any(one.reached or one.trained for one in side.linears)
    late = counted(
        "llama-causal", tmp_path, method={"name": "lora", "targets": ["model.layers.1.mlp.down_proj"]}
    )
    assert {one.block for one in late.linears if one.reached} == {1}


AGAIN = {
    "projections": ("gate up", 0),
    "attention": ("q k v o gate up", 0),
    "input": ("q k v o gate up", 1),
    "checkpoint": ("q k v o gate up down", 1),
}


@pytest.mark.parametrize("kept", AGAIN)
def test_what_is_not_kept_is_executed_again(tmp_path: Path, kept: Any) -> None:
    flops, row = counted("llama-causal", tmp_path), example(8)
    block = of_shape(BlockShape(64, 4, 2, 16, 128, sublayers=DECODER))
    again = CHECKPOINT if kept == "checkpoint" else Again(kept, *remade(block, kept))
    every = {(one.stack, one.block) for one in flops.linears}
    extra = flops.executed(row, dict.fromkeys(every, again)) - flops.executed(row, dict.fromkeys(every, ALL))
    roles, attention = AGAIN[kept]
    linears = sum(one.weights + one.added for one in flops.linears if one.role in roles.split())
    assert extra == 2 * 8 * linears + attention * 2 * 4 * 64 * 8 * 8 / 2


def test_a_post_norm_block_runs_its_down_projection_again() -> None:
    bert = of_shape(BlockShape(64, 4, 4, 16, 128, gated=False, sublayers=sublayers(False, "layer", True)))
    assert remade(bert, "all") == (frozenset(), False)
    assert remade(bert, "projections") == ({"up"}, False)
    assert remade(bert, "attention") == ({"q", "k", "v", "o", "up", "down"}, False)
    assert remade(bert, "input") == ({"q", "k", "v", "o", "up", "down"}, True)


# ------------------------------------------------------------------ measuring


def small(folder: Path, **changes: Any) -> Recipe:
    """A recipe of a tiny random model."""
    from petune.recipe import load_recipe

    return load_recipe(settings(folder, "llama", **changes))


def test_a_step_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (case,) = cases(recipe)
    found = measure(case, steps=2)
    assert len(found.seconds) == len(found.tokens) == len(found.flops) == len(found.executed) == 2
    assert min(found.seconds) > 0 and found.error is None and found.loss > 0 and found.host > 2**24
    assert found.kept == "all 2" and found.peak is None
    assert all(executed > model for executed, model in zip(found.executed, found.flops, strict=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_tokens_are_those_of_the_rows_not_of_the_padding(tmp_path: Path) -> None:
    from petune.run.build import prepare

    recipe = small(tmp_path, batch_size=24, accumulate=1)  # one step is one epoch
    found = measure(cases(recipe)[0], steps=1)
    assert found.tokens == (sum(one.tokens for one in prepare(recipe).encoded.train),)


def test_recomputation_shows_in_what_is_executed(tmp_path: Path) -> None:
    kept, again = (
        measure(cases(small(tmp_path, gradient_checkpointing=flag))[0], steps=1) for flag in (False, True)
    )
    assert again.kept == "checkpoint 2"
    assert again.flops == kept.flops and again.executed[0] > 1.25 * kept.executed[0]


def test_every_method_is_measured_and_the_recipes_own_keeps_its_settings(tmp_path: Path) -> None:
    found = cases(small(tmp_path, method={"name": "lora", "r": 3}), ["full", "lora"])
    assert [case.method for case in found] == ["full", "lora"]
    assert [getattr(case.recipe.method, "r", None) for case in found] == [None, 3]


def test_memory_policies_become_the_recipes_memory(tmp_path: Path) -> None:
    streams = cases(
        small(
            tmp_path, method="full", clip=None, accumulate=1, kernels="reference", memory={"stream": "fp32"}
        ),
        (),
        ["input"],
    )
    assert streams[0].recipe.memory == MemoryConfig("input", "none", stream="fp32")
    found = cases(small(tmp_path), (), ["all", "attention/input", "auto"])
    chosen = [(case.recipe.memory.keep, case.recipe.memory.offload) for case in found]
    assert chosen == [("all", "none"), ("attention", "input"), ("auto", "auto")]


def test_a_policy_decides_what_blocks_keep(tmp_path: Path) -> None:
    write_model(tmp_path / "llama", "llama")  # attention that drops out would run unfused
    recipe = small(tmp_path, kernels="reference")
    kept = [measure(case, steps=1) for case in cases(recipe, (), ["all", "attention", "input"])]
    assert [one.kept for one in kept] == ["all 2", "attention 2", "input 2"]
    assert kept[0].executed[0] < kept[1].executed[0] < kept[2].executed[0]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    with pytest.raises(UsageError, match="no method named 'lore'"):
        cases(recipe, ["lore"])
    for policy in ("everything", "all/disk"):
        with pytest.raises(UsageError, match="no memory policy"):
            cases(recipe, (), [policy])
    with pytest.raises(UsageError, match="one process"):
        cases(small(tmp_path, parallel="dp"))


def test_memory_that_runs_out_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise MemoryError("too much")

    (case,) = cases(small(tmp_path))
    monkeypatch.setattr("petune.parallel.runner.Runner.backward", exhausted)
    found = measure(case, steps=1)
    assert found.error is not None and found.error.startswith(
        "out of memory in the forward and backward pass"
    )


def test_shares_of_a_rate(tmp_path: Path) -> None:
    (case,) = cases(small(tmp_path))
    found = Measured(case, tokens=(10, 20), seconds=(1.0, 1.0), flops=(30.0, 50.0), executed=(60.0, 100.0))
    assert found.utilisation(100.0) == 0.4 and found.hardware_utilisation(100.0) == 0.8
    assert found.quartiles[1] == 15
    assert Measured(case, tokens=(10,), seconds=(2.0,)).utilisation(1.0) is None


def test_a_picture_holds_what_was_measured(tmp_path: Path) -> None:
    (case,) = cases(small(tmp_path))
    found = Measured(case, tokens=(10, 20), seconds=(1.0, 1.0), flops=(30.0, 50.0), host=2**30)
    draw(
        [found, Measured(Case(case.recipe, "full", "all"), error="out of memory")], 100.0, tmp_path / "x.png"
    )
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------ the benchmarks beside the peers


def test_a_spec_says_everything_about_a_measurement() -> None:
    found = peers.Spec.parse("petune:1x131072:cap=80:keep=attention:offload=attention:steps=3", warm=0.0)
    assert (found.rows, found.tokens, found.cap, found.steps, found.warm) == (1, 131072, 80.0, 3, 0.0)
    assert found.memory == {"budget": 80.0, "keep": "attention", "offload": "attention"}
    assert peers.Spec.parse("petune:4x2048").memory == "auto"
    assert peers.Spec.parse("petune:4x2048:ckpt").memory == {"keep": "input", "offload": "none"}
    assert peers.Spec.parse("petune:4x2048:fp8:kernels=off").settings == "kernels=off fp8"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("axolotl:4x2048", "no variant 'axolotl'"),
        ("peft", "ROWSxTOKENS"),
        ("peft:4x2048:keep=all", "a setting of petune alone"),
        ("petune:4x2048:keep", "is no setting"),
        ("petune:4x2048:ckpt=1", "is no setting"),
        ("petune:4x2048:r=many", "invalid literal"),
    ],
)
def test_a_wrong_spec_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        peers.Spec.parse(text)


def test_the_last_exception_is_what_failed() -> None:
    text = (
        "Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\n   Tried to allocate\nwarning:"
        " leaked semaphores"
    )
    assert peers.last_error(text).startswith("torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert peers.last_error("one\ntwo\n") == "two"
    assert peers.last_error("") == ""


@pytest.mark.forks
def test_a_measurement_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(60)\n")
    assert peers.in_own_process(str(script), {}, 0.5) == {"error": "not done after 0 s"}


def test_every_variant_reads_the_same_lengths() -> None:
    options = bert_peers.Options("peft", "tiny", "cpu", rows=4, longest=64, steps=2, warm=0.0, dropout=0.0)
    plain, padded = (
        next(bert_peers.batches(replace(options, variant=name), seed=1)) for name in ("peft", "peft-512")
    )
    assert torch.equal(plain["attention_mask"].sum(1), padded["attention_mask"].sum(1))
    assert padded["input_ids"].shape == (4, 64) and plain["input_ids"].shape[1] % 8 == 0
    width = plain["input_ids"].shape[1]
    assert torch.equal(plain["input_ids"], padded["input_ids"][:, :width])


def test_the_ceiling_is_the_sum_of_its_parts_at_the_rates() -> None:
    shape, rates = ceiling.Shape(), ceiling.Rates(676e12, 676e12, 690e12, 384e12, 384e12, 4.25e12)
    setting = ceiling.Setting.parse("4x2048")
    parts = ceiling.ideal(shape, setting, rates)
    blocks = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert parts["matmul"] == pytest.approx(4 * blocks * 8192 / 676e12)
    assert parts["head"] == pytest.approx((4 * 4096 * 128256 / 690e12 + 4 * 128256 / 4.25e12) * 8192)
    assert parts["attention"] == pytest.approx(3.5 * 2 * 4096 * 2048 * 32 * 8192 / 384e12)
    assert 8192 / sum(parts.values()) == pytest.approx(18_577, rel=0.01)


def test_the_ceiling_falls_with_what_is_recomputed() -> None:
    rates = ceiling.Rates(676e12, 676e12, 690e12, 487e12, 487e12, 4.25e12)
    speeds = [
        1 / sum(ceiling.ideal(ceiling.Shape(), ceiling.Setting.parse(f"1x8192:{keep}"), rates).values())
        for keep in ceiling.KEPT
    ]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) == 4
    for wrong in ("8192", "1x8192:some", "1x8192:all:input"):
        with pytest.raises(ValueError, match=r"expected"):
            ceiling.Setting.parse(wrong)


def test_the_ceiling_is_measured_without_a_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert ceiling.main(["--tiny", "2x32", "2x32:input"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 x 32")]
    assert len(rows) == 2
    found = json.loads((tmp_path / "ceiling.json").read_text())
    assert all(value > 0 for one in found for value in one["seconds"].values())


def run_script(name: str, *words: str, out: Path) -> list[dict[str, Any]]:
    """The lines of JSON that a benchmark prints."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(out),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_petune_and_peft_learn_alike_in_processes_of_their_own(tmp_path: Path) -> None:
    words = ("--tiny", "petune:2x16:kernels=reference:keep=input", "peft:2x16:ckpt")
    ours, theirs = run_script("peers.py", *words, out=tmp_path)
    assert ours["trained"] == theirs["trained"] and ours["tokens_per_s"] > 0
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.02)
    assert theirs["losses"][0] > theirs["losses"][-1]
    assert len((tmp_path / "peers.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_bert_is_measured_beside_peft(tmp_path: Path) -> None:
    ours, theirs = run_script("bert_peers.py", "--tiny", "petune", "peft", out=tmp_path)
    assert ours["trained"] == theirs["trained"] and ours["fill"] == theirs["fill"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.02)
