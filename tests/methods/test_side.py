"""The ladder: its equation, its identity at the start, and a backbone that keeps nothing for backward."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import petune
import petune.models.stack
from petune.errors import UsageError
from petune.methods import tuned_parameters, tuned_state, tuning, without_tuning, wrap
from petune.methods.pruning import fisher_of, weigh
from petune.methods.side import Ladder
from petune.models.fresh import draw_tuned
from petune.models.stack import Stack
from tests.methods import references
from tests.methods.zoo import (
    FOUR,
    GENERATE,
    GENERATING,
    assert_same_gradients,
    batch,
    frozen,
    gradients,
    prompt,
    stir,
    tiny,
)

DROPOUT: dict[str, dict[str, float]] = {
    "bert-classify": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    "bart-seq2seq": {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
    "t5-seq2seq": {"dropout_rate": 0.3},
    "llama-causal": {"attention_dropout": 0.3},
}


def sided(name: str, *, std: float = 0.2, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A side-tuned model of the zoo away from its start."""
    model = wrap(tiny(name, **(changes or {})), "side", **{"reduction": 4, **settings})
    stir(model, std=std)
    return model


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


@pytest.mark.parametrize("name", FOUR)  # tests/models/test_families.py has every model
def test_side_starts_as_the_base_bit_for_bit(name: str) -> None:
    inputs = batch(name)
    expected = frozen(tiny(name))(**inputs)
    found = wrap(tiny(name), "side", reduction=4, also_train=())(**inputs)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_the_decoders_backbone_reads_encoder_states_that_lie_as_in_the_base(name: str) -> None:
    model = wrap(tiny(name), "side", reduction=4)
    strides = []
    for path, module in model.named_modules():
        if path.endswith(("encoder_attn.k_proj", "EncDecAttention.k")) and ".side." not in path:
            module.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
    model(**batch(name))
    # of tokens x width, without the side state that travels beside them
    assert strides == [(9 * 64, 64, 1)] * 2


# -- the equation, on a Llama written out by hand with the same tensors --


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions of [batch, heads, seq, dim]."""
    seq, dim = x.shape[-2:]
    angle = torch.arange(seq, dtype=x.dtype)[:, None] * base ** -(
        torch.arange(0, dim, 2, dtype=x.dtype) / dim
    )
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin


def llama_block(p: dict[str, Tensor], x: Tensor, heads: int, kv_heads: int, eps: float) -> Tensor:
    """One pre-norm block with causal grouped-query attention and a gated MLP; x [batch, seq, width]."""
    rows, seq, _ = x.shape
    h = rms(x, p["input_layernorm.weight"], eps)

    def split(name: str, count: int) -> Tensor:
        return (h @ p[f"self_attn.{name}_proj.weight"].T).view(rows, seq, count, -1).transpose(1, 2)

    q, k, v = turned(split("q", heads), 10000.0), turned(split("k", kv_heads), 10000.0), split("v", kv_heads)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), float("-inf")).softmax(-1)
    x = x + (scores @ v).transpose(1, 2).reshape(rows, seq, -1) @ p["self_attn.o_proj.weight"].T
    h = rms(x, p["post_attention_layernorm.weight"], eps)
    up = F.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)
    return x + up @ p["mlp.down_proj.weight"].T


@pytest.mark.parametrize("layers", [None, (1,), (0, 2)])
@pytest.mark.parametrize("end", ["residual", "paper", "blend", 0.3])
def test_forward_and_gradients_are_those_of_a_ladder_written_by_hand(end: str | float, layers: Any) -> None:
    """A number is the fixed alpha of a blend."""
    inputs = batch("llama-causal")
    ids, labels = inputs["input_ids"], inputs["labels"]
    temperature = 0.7
    asked = {"end": end, "temperature": temperature} if end in ("residual", "paper") else {"end": "blend"}
    asked |= {"alpha": end} if isinstance(end, float) else {}
    base = frozen(tiny("llama-causal", num_hidden_layers=3).double())
    model = wrap(
        tiny("llama-causal", num_hidden_layers=3).double(),
        "side",
        reduction=4,
        layers=layers,
        **asked,
    )
    stir(model)
    loss, found = gradients(model, {"input_ids": ids, "labels": labels})

    p = {key: value.detach().clone().requires_grad_() for key, value in tuned_state(model).items()}
    side = {key.removeprefix("model.layers.side."): value for key, value in p.items()}
    eps = base.config.rms_norm_eps
    hidden = [base.model.embed_tokens(ids)]
    for layer in base.model.layers:
        hidden.append(llama_block(dict(layer.named_parameters()), hidden[-1], 8, 4, eps))
    state = hidden[0] @ side["down.0.weight"].T + side["down.0.bias"]
    for index in layers or range(3):
        h = hidden[1 + index]
        if asked["end"] != "blend":
            gate = torch.sigmoid(side[f"gates.{index}"] / temperature)
            state = gate * state + (1 - gate) * (
                h @ side[f"down.{index + 1}.weight"].T + side[f"down.{index + 1}.bias"]
            )
        block = {
            key.removeprefix(f"blocks.{index}."): value
            for key, value in side.items()
            if key.startswith(f"blocks.{index}.")
        }
        state = llama_block(block, state, 8, 4, eps)
    if end == "paper":
        out = rms(state, side["norm.weight"], eps) @ side["up.weight"].T + side["up.bias"]
    elif asked["end"] == "blend":
        alpha = end if isinstance(end, float) else side["alpha"].sigmoid()
        mixture = alpha * hidden[-1] + (1 - alpha) * (state @ side["up.weight"].T + side["up.bias"])
        out = rms(mixture, base.model.norm.weight, eps)
    else:
        out = rms(hidden[-1] + state @ side["up.weight"].T + side["up.bias"], base.model.norm.weight, eps)
    logits = out @ base.lm_head.weight.T
    expected = F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
    )
    expected.backward()
    assert found.keys() == {key for key, value in p.items() if value.grad is not None}
    # transformers' loss and norms compute in float32
    assert float(loss) == pytest.approx(float(expected.detach()), rel=2e-7)
    assert_same_gradients(
        found, {key: value.grad for key, value in p.items() if value.grad is not None}, 2e-6
    )


def test_gates_start_half_open_and_there_is_one_for_each_block() -> None:
    model = wrap(tiny("llama-causal"), "side", reduction=4)
    gates = {key: value for key, value in tuned_state(model).items() if ".gates." in key}
    assert len(gates) == 2
    assert all(value.shape == () and float(value) == 0 for value in gates.values())


@pytest.mark.parametrize("name", FOUR)
def test_a_ladder_beside_some_blocks_has_nothing_of_the_others(name: str, tmp_path: Path) -> None:
    inputs = batch(name)
    model = wrap(tiny(name), "side", reduction=4, layers=[1], also_train=())
    assert torch.equal(model(**inputs).logits, frozen(tiny(name))(**inputs).logits)
    repr(model)
    stir(model, std=0.1)
    kept = Kept(model).of(model, inputs)
    assert kept["blocks"] == 0 < kept["ladder"]
    _, found = gradients(model, inputs)
    levels = {key.partition(".side.")[2].split(".")[0:2][-1] for key in found if ".gates." in key}
    blocks = {key.partition(".side.blocks.")[2].split(".")[0] for key in found if ".side.blocks." in key}
    down = {key.partition(".side.down.")[2].split(".")[0] for key in found if ".side.down." in key}
    assert (levels, blocks, down) == ({"1"}, {"1"}, {"0", "2"})
    # a learned position bias is that of the first side block
    tables = [value for key, value in found.items() if "relative_attention_bias" in key]
    assert len(tables) == (2 if name == "t5-seq2seq" else 0) and all(map(Tensor.any, tables))
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    if name in GENERATING:
        settings = {**GENERATE, "num_beams": 3}
        assert torch.equal(
            model.generate(**prompt(name), **settings),
            model.generate(**prompt(name), use_cache=False, **settings),
        )


@pytest.mark.parametrize("name", FOUR)
def test_a_blend_begins_half_way_and_reads_the_input_alone(name: str, tmp_path: Path) -> None:
    inputs = batch(name)
    model = wrap(tiny(name), "side", reduction=4, end="blend", also_train=())
    ladder: Any = stacks(model)[-1].ladder
    assert ladder.alpha.sigmoid() == 0.5
    stir(model, std=0.1)
    kept = Kept(model).of(model, inputs)
    assert kept["blocks"] == 0 < kept["ladder"]
    _, found = gradients(model, inputs)
    assert found.keys() == tuned_state(model).keys() and not any(".gates." in key for key in found)
    down = {key.partition(".side.down.")[2].split(".")[0] for key in found if ".side.down." in key}
    assert down == {"0"} and sum(key.endswith(".alpha") for key in found) == 1
    assert all(map(Tensor.any, found.values())) or name != "llama-causal"  # keys' biases have none
    with without_tuning(model):
        assert torch.equal(model(**inputs).logits, frozen(tiny(name))(**inputs).logits)
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    draw_tuned(model, 5)
    assert ladder.alpha == 0 and ladder.up.weight.any()
    if name in GENERATING:
        settings = {**GENERATE, "num_beams": 3}
        assert torch.equal(
            model.generate(**prompt(name), **settings),
            model.generate(**prompt(name), use_cache=False, **settings),
        )


def test_a_blend_of_a_fixed_alpha_is_stored_with_its_settings(tmp_path: Path) -> None:
    model = sided("bert-classify", end="blend", alpha=0.9)
    assert not any(key.endswith("alpha") for key in tuned_state(model))
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny("bert-classify"), tmp_path / "tuned")
    assert torch.equal(again(**batch("bert-classify")).logits, model(**batch("bert-classify")).logits)


def test_a_static_cache_has_no_use_for_levels_that_are_not_there() -> None:
    model = sided("llama-causal", layers=[1])
    expected = model.generate(**prompt("llama-causal"), use_cache=False, **GENERATE)
    found = model.generate(**prompt("llama-causal"), cache_implementation="static", **GENERATE)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ([1, 7], "there is no block 7"),
        ([], "without a side block"),
        ([2], "decoder.block  layers leaves this stack without a side block"),
    ],
)
def test_layers_that_a_ladder_cannot_stand_beside_are_refused(layers: list[int], match: str) -> None:
    model = tiny("t5-seq2seq", num_layers=3, num_decoder_layers=2)
    before = list(model.state_dict())
    with pytest.raises(UsageError, match=match):
        wrap(model, "side", reduction=4, layers=layers)
    assert list(model.state_dict()) == before
    wrap(model, "side", reduction=4, layers=[1, 2])  # the decoder has two blocks


def test_side_blocks_are_the_familys_own_at_width_over_reduction() -> None:
    for name in FOUR:
        model = wrap(tiny(name), "side", reduction=4)
        for stack in stacks(model):
            ladder = stack.ladder
            assert isinstance(ladder, Ladder)
            assert [type(block) for block in ladder.blocks] == [type(block) for block in stack.blocks]
            for own, block in zip(ladder.blocks, stack.blocks, strict=True):
                theirs = dict(block.named_parameters())
                for key, value in own.named_parameters():
                    fixed = "relative_attention_bias" in key  # one value a head, and heads are kept
                    assert value.shape == (
                        theirs[key].shape if fixed else tuple(size // 4 for size in theirs[key].shape)
                    ), key


# -- the backbone --


class Kept:
    """Counts what autograd keeps for backward, by who was running: a ladder, a block, what lies around the
    stacks, or the tail and head."""

    def __init__(self, model: nn.Module) -> None:
        self.counts = {"ladder": 0, "blocks": 0, "around": 0, "tail": 0}
        self.running = ["around"]
        last = stacks(model)[-1]
        for stack in stacks(model):
            for block in stack.blocks:
                block.register_forward_pre_hook(lambda *_: self.running.append("blocks"))
                block.register_forward_hook(lambda *_: self.running.pop() and None)
            for name in ("begin", "step", "end"):
                setattr(
                    stack.side, name, self.watched(getattr(stack.side, name), name == "end" and stack is last)
                )

    def watched(self, method: Any, last: bool) -> Any:
        def run(*args: Any) -> Any:
            self.running.append("ladder")
            try:
                return method(*args)
            finally:
                self.running.pop()
                self.running = ["tail"] if last else self.running

        return run

    def of(self, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, int]:
        """The counts of one forward."""
        self.counts, self.running = dict.fromkeys(self.counts, 0), ["around"]

        def pack(tensor: Tensor) -> Tensor:
            self.counts[self.running[-1]] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**inputs)
        return self.counts


@pytest.mark.parametrize("name", FOUR)
def test_all_that_is_kept_for_backward_belongs_to_the_ladder_the_tail_and_the_head(name: str) -> None:
    model = wrap(tiny(name), "side", reduction=4).train()
    kept = Kept(model).of(model, batch(name))
    assert kept["blocks"] == kept["around"] == 0
    assert kept["ladder"] > 0
    assert kept["tail"] > 0


@pytest.mark.parametrize("name", FOUR)
def test_the_blocks_keep_nothing_even_when_their_inputs_ask_for_gradients(name: str) -> None:
    """As with enable_input_require_grads, which gradient checkpointing may turn on."""
    model = wrap(tiny(name), "side", reduction=4).train()
    kept = Kept(model)
    plain = dict(kept.of(model, batch(name)))
    model.enable_input_require_grads()
    found = kept.of(model, batch(name))
    assert found["blocks"] == 0
    assert found["ladder"] == plain["ladder"]
    model(**batch(name)).loss.backward()
    assert {key for key, value in model.named_parameters() if value.grad is not None} == set(
        tuned_parameters(model)
    )


@pytest.mark.parametrize("name", FOUR)
def test_the_count_finds_blocks_that_run_with_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tests above can fail: without no_grad the blocks keep tensors as soon as anything in them asks
    for a gradient."""
    model = wrap(tiny(name), "side", reduction=4).train()
    kept = Kept(model)
    kept.of(model, batch(name))  # from here on nobody asks what trains
    model.requires_grad_(True)
    assert kept.of(model, batch(name))["blocks"] == 0
    monkeypatch.setattr(petune.models.stack.torch, "no_grad", contextlib.nullcontext)
    assert kept.of(model, batch(name))["blocks"] > 0


@pytest.mark.parametrize("name", FOUR)
def test_the_backbone_gets_no_gradient(name: str) -> None:
    model = sided(name)
    _, found = gradients(model, batch(name))
    assert found.keys() == tuned_parameters(model).keys()


@pytest.mark.parametrize(("method", "settings"), [("side", {"reduction": 4}), ("head", {})])
def test_what_would_learn_nothing_in_a_backbone_is_refused(method: str, settings: Any) -> None:
    model: Any = wrap(tiny("bert-classify"), method, **settings).train()
    inputs, table = batch("bert-classify"), model.get_input_embeddings()
    table.weight.requires_grad_()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"word_embeddings\.weight  this tensor requires gradients"):
            model(**inputs)
    petune.mark_only_trainable(model)
    table.neftune_noise_alpha = 5.0  # as transformers' Trainer asks for noise
    with pytest.raises(UsageError, match="embeddings get no noise"):
        model.train()(**inputs)
    del table.neftune_noise_alpha
    model.train()(**inputs).loss.backward()
    with pytest.raises(UsageError, match="works behind the last block alone"):
        wrap(tiny("bert-classify"), method, also_train=("layer.1.output",), **settings)


def backbone_states(model: Any, run: Any) -> list[Tensor]:
    """What enters and leaves every backbone block while `run` runs."""
    seen: list[Tensor] = []
    handles = []
    for stack in stacks(model):
        for block in stack.blocks:
            handles.append(
                block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
            )
            handles.append(
                block.register_forward_hook(
                    lambda _, __, out: seen.append(
                        (out[0] if isinstance(out, tuple) else out).detach().clone()
                    )
                )
            )
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", FOUR)
def test_the_backbone_runs_in_eval_mode_whatever_the_model_is_told(name: str) -> None:
    model = wrap(tiny(name, **DROPOUT[name]), "side", reduction=4, dropout=0.3)
    inputs = batch(name)
    expected = backbone_states(model.eval(), lambda: model(**inputs))
    for _ in range(2):
        model.train()
        found = backbone_states(model, lambda: model(**inputs))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert all(stack.side.training for stack in stacks(model))  # type: ignore[union-attr]
    model.eval()
    model(**inputs)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_the_encoder_alone_runs_in_eval_mode_too(name: str) -> None:
    """`generate` calls the encoder itself, not through the model."""
    model = wrap(tiny(name, **DROPOUT[name]), "side", reduction=4).train()
    ids = batch(name)["input_ids"]
    encoder = model.get_encoder()
    first, second = (encoder(ids).last_hidden_state[..., :64] for _ in range(2))
    assert torch.equal(first, second)


def test_a_model_wrapped_in_eval_mode_is_in_eval_mode() -> None:
    assert not any(module.training for module in wrap(tiny("llama-causal"), "side", reduction=4).modules())


def test_side_dropout_acts_in_training_only() -> None:
    model = sided("llama-causal", dropout=0.5).eval()
    inputs = batch("llama-causal")
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


# -- generation and the cache --


@pytest.mark.crossed(1)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", [*GENERATING, "qwen3-causal", "gemma3-causal"])
def test_generation_with_a_cache_is_generation_without(name: str, beams: int) -> None:
    model = sided(name)
    settings = {**GENERATE, "num_beams": beams}
    found = model.generate(**prompt(name), **settings)
    assert torch.equal(found, model.generate(**prompt(name), use_cache=False, **settings))
    with without_tuning(model):
        assert not torch.equal(found, model.generate(**prompt(name), **settings))


@pytest.mark.parametrize("end", ["residual", "paper"])
def test_a_static_cache_gives_the_same_tokens(end: str) -> None:
    model = sided("llama-causal", end=end)
    expected = model.generate(**prompt("llama-causal"), use_cache=False, **GENERATE)
    assert torch.equal(
        model.generate(**prompt("llama-causal"), cache_implementation="static", **GENERATE), expected
    )


@pytest.mark.parametrize("name", GENERATING)
def test_step_by_step_logits_with_a_cache_are_those_of_one_pass(name: str) -> None:
    model = sided(name)
    torch.manual_seed(6)
    ids = torch.randint(3, 97, (2, 7))
    crossing = {"input_ids": batch(name, rows=2)["input_ids"]} if name != "llama-causal" else {}
    key = "decoder_input_ids" if crossing else "input_ids"
    with torch.no_grad():
        whole = model(**crossing, **{key: ids}).logits
        cache, parts = None, []
        for index in range(7):
            out = model(**crossing, **{key: ids[:, index : index + 1]}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_encoder_states_without_a_side_part_are_refused(name: str) -> None:
    model, base, inputs = sided(name), tiny(name), batch(name)
    own = model.get_encoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    expected = model(**inputs).logits
    rest = {key: value for key, value in inputs.items() if key != "input_ids"}
    torch.testing.assert_close(model(encoder_outputs=own, **rest).logits, expected)
    foreign = base.get_encoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    with pytest.raises(UsageError, match="no side state"):
        model(encoder_outputs=foreign, **rest)


# -- what a Hugging Face model can do --


@pytest.mark.parametrize("name", FOUR)
def test_hidden_states_are_as_many_and_as_wide_as_the_bases(name: str) -> None:
    inputs = {**batch(name), "output_hidden_states": True}
    base, model = frozen(tiny(name))(**inputs), wrap(tiny(name), "side", reduction=4)(**inputs)
    for field in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        expected = getattr(base, field, None)
        if expected is not None:
            assert [part.shape for part in getattr(model, field)] == [part.shape for part in expected]
            assert all(
                torch.equal(one, other)
                for one, other in zip(getattr(model, field)[:-1], expected[:-1], strict=True)
            )


@pytest.mark.crossed(1)
@pytest.mark.parametrize("end", ["residual", "paper"])
@pytest.mark.parametrize("name", FOUR)
def test_the_papers_end_is_another_model_and_trains(name: str, end: str) -> None:
    model = wrap(tiny(name), "side", reduction=4, end=end)
    same = torch.equal(model(**batch(name)).logits, tiny(name).requires_grad_(False)(**batch(name)).logits)
    assert same is (end == "residual")
    stir(model, std=0.05)
    _, found = gradients(model, batch(name))
    assert found.keys() == tuned_parameters(model).keys()
    with without_tuning(model):
        base = tiny(name).requires_grad_(False)
        for head, value in tuned_state(model).items():
            if head in base.state_dict():
                base.get_parameter(head).copy_(value)
        assert torch.equal(model(**batch(name)).logits, base(**batch(name)).logits)


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_a_deep_copy_stands_alone(name: str) -> None:
    inputs = batch(name)
    model = sided(name)
    twin, expected = copy.deepcopy(model), model(**inputs).logits
    stir(model, seed=8)
    assert torch.equal(twin(**inputs).logits, expected)
    stir(twin, seed=8)
    torch.testing.assert_close(twin(**inputs).logits, model(**inputs).logits)
    other = wrap(tiny(name, seed=4), "side", reduction=4)
    other.load_state_dict(twin.state_dict(), strict=True)
    assert torch.equal(other(**inputs).logits, twin(**inputs).logits)


@pytest.mark.parametrize("name", FOUR)
def test_grad_mode_and_the_model_survive_an_exception_in_a_block(name: str) -> None:
    model = sided(name)
    expected = gradients(model, batch(name))[1]

    def fail(*_: Any) -> None:
        raise KeyError

    handle = stacks(model)[-1].blocks[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(**batch(name))
    handle.remove()
    assert torch.is_grad_enabled()
    assert_same_gradients(gradients(model, batch(name))[1], expected, 0)


def test_a_bfloat16_backbone_keeps_its_dtype_beside_a_float32_ladder() -> None:
    for name in FOUR:
        model = wrap(tiny(name).bfloat16(), "side", reduction=4, also_train=())
        assert {value.dtype for value in tuned_state(model).values()} == {torch.float32}
        base = tiny(name).bfloat16().requires_grad_(False)
        assert torch.equal(model(**batch(name)).logits, base(**batch(name)).logits)
        stir(model, std=0.1)
        _, found = gradients(model, batch(name))
        assert all(torch.isfinite(value).all() for value in found.values())


def test_a_width_that_leaves_odd_heads_is_refused_where_positions_turn() -> None:
    with pytest.raises(UsageError, match="heads of width 1, and rotary positions turn pairs"):
        wrap(tiny("llama-causal"), "side", reduction=8)
    wrap(tiny("bert-classify"), "side", reduction=8)


# ------------------------------------------------------------------ a pruned start


@pytest.mark.parametrize("start", ["pruned", "fisher"])
def test_a_pruned_start_follows_the_paper_in_float64(start: str) -> None:
    references.pruned_start_follows_the_paper(start)


def test_fisher_information_leaves_the_base_as_it_was() -> None:
    base, inputs = tiny("t5-seq2seq"), batch("t5-seq2seq")
    base.shared.requires_grad_(False)
    found = fisher_of(base, (base(**inputs).loss for _ in range(2)))
    assert not base.shared.weight.requires_grad and base.lm_head.weight.grad is None
    assert found["decoder.block.1.layer.2.DenseReluDense.wo.weight"].any()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"start": "fisher"}, "nobody has measured"),
        ({"fisher_rows": 4}, "of start: fisher"),
        ({"alpha": 0.5}, "of end: blend"),
        ({"end": "blend", "temperature": 0.5}, "temperature is of gates"),
        ({"end": "blend", "alpha": 1.0}, "must be below 1"),
    ],
)
def test_a_setting_that_lacks_what_it_needs_is_refused(settings: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        wrap(tiny("llama-causal"), "side", reduction=4, **settings)


def test_a_ladder_from_fisher_information_comes_back_without_measuring(tmp_path: Path) -> None:
    base, inputs = tiny("llama-causal"), batch("llama-causal")
    weigh(base, fisher_of(base, (base(**inputs).loss for _ in range(1))))
    model = wrap(base, "side", reduction=4, start="fisher", also_train=())
    stir(model)
    petune.save(model, tmp_path / "tuned")
    found = petune.load(tiny("llama-causal"), tmp_path / "tuned")
    assert torch.equal(found(**inputs).logits, model(**inputs).logits)
    assert tuning(found).config == tuning(model).config


def test_pruned_heads_that_turn_keep_pairs_and_share_keys_as_the_backbones_do() -> None:
    base, model = tiny("llama-causal"), wrap(tiny("llama-causal"), "side", reduction=4, start="pruned")
    block, side = base.model.layers[0], stacks(model)[0].side.blocks[0]
    stream = references.most(base.model.embed_tokens.weight.abs().sum(0), 16)
    q, k, v = (getattr(block.self_attn, f"{name}_proj").weight[:, stream] for name in "qkv")
    for head in range(4):  # 8 heads of q, 2 to a key, 8 features each: one pair of 4 is left
        keys = slice(8 * head, 8 * head + 8)
        shared = (q[16 * head : 16 * head + 8].abs() + q[16 * head + 8 : 16 * head + 16].abs()) / 2
        each = (shared * k[keys].abs() * v[keys].abs()).sum(1)
        pair = int((each[:4] + each[4:]).argmax())
        left = side.self_attn.k_proj.weight[2 * head : 2 * head + 2]
        assert torch.equal(left, k[keys][[pair, pair + 4]])
        for one in range(2):
            first = 8 * (2 * head + one)
            left = side.self_attn.q_proj.weight[2 * (2 * head + one) :][:2]
            assert torch.equal(left, q[[first + pair, first + pair + 4]])


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-gated", "gemma2-causal", "opt-causal"])
def test_a_pruned_start_begins_as_the_base_and_comes_back(name: str, tmp_path: Path) -> None:
    inputs = batch(name)
    expected = frozen(tiny(name))(**inputs).logits
    model = wrap(tiny(name), "side", reduction=4, start="pruned", also_train=())
    assert torch.equal(model(**inputs).logits, expected)
    stir(model)
    model(**inputs).loss.backward()
    petune.save(model, tmp_path / "tuned")
    assert torch.equal(petune.load(tiny(name), tmp_path / "tuned")(**inputs).logits, model(**inputs).logits)


def test_a_pruned_ladder_beside_some_blocks_has_their_part_of_the_whole_one() -> None:
    """The chain goes through all blocks; T5's table of distances is the first block's."""
    some, whole = (
        tuned_state(wrap(tiny("t5-seq2seq"), "side", reduction=4, start="pruned", layers=layers))
        for layers in ([1], None)
    )
    for key, value in some.items():
        if ".side.blocks." in key:
            origin = key.replace("blocks.1", "blocks.0") if "relative_attention_bias" in key else key
            assert torch.equal(value, whole[origin]), key


def test_drawing_anew_leaves_what_was_pruned() -> None:
    references.drawing_anew_leaves_what_was_pruned()


@pytest.mark.parametrize(
    ("name", "match"),
    [("qwen3-causal", "q_norm"), ("phi3-causal", "q, k and v apart"), ("glm4-causal", "gate and up apart")],
)
def test_what_pruning_has_no_rule_for_is_refused_by_name(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as refused:
        wrap(tiny(name), "side", reduction=4, start="pruned")
    assert "start: random" in str(refused.value)
