"""The activation cache: losses and gradients of an uncached run to the bit, each row through the backbone
once, and nothing read where something else was asked."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import FileError, UsageError
from petune.files.row_store import RowStore
from petune.kernels.block.module import FusedBlock
from petune.methods import without_tuning, wrap
from petune.methods.activation_cache import ActivationCache, Counts, sources_of
from petune.methods.stack_levels import StackLevels, stack_bytes
from petune.models.stack import Stack
from tests.methods.sided import assert_equal, sided
from tests.methods.zoo import GENERATING, LADDERED, ZOO, assert_same_gradients, batch, gradients, stir, tiny


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def count_blocks(model: nn.Module) -> list[int]:
    """A list that grows by one for each call of a block of the backbone."""
    calls: list[int] = []
    for stack in stacks(model):
        for number, block in stack.numbered:
            block.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


# ------------------------------------------------------------------ what is computed


# one model of each family; the others have another head
FAMILIES = {config: name for name, (_, config, _) in ZOO.items()}.values()


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("end", ["residual", "paper"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.long) for name in LADDERED]
)
def test_later_epochs_are_the_uncached_ones_to_the_bit_and_run_no_block(
    name: str, end: str, tmp_path: Path
) -> None:
    model = sided(name, end=end)
    batches = [batch(name, seed=seed) for seed in (1, 2)]
    expected = [gradients(model, one) for one in batches]
    calls, blocks = count_blocks(model), sum(len(stack) for stack in stacks(model))
    with ActivationCache(model, tmp_path):
        for _ in range(2):
            for one, right in zip(batches, expected, strict=True):
                assert_equal(gradients(model, one), right)
    assert len(calls) == blocks * len(batches)
    assert all(stack.levels is None for stack in stacks(model))
    assert_equal(gradients(model, batches[0]), expected[0])
    assert len(calls) == blocks * (len(batches) + 1)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("base_dtype", [None, "fp8"])
@pytest.mark.parametrize("name", ["bert-mlm", "bart-seq2seq", "t5-seq2seq", "llama-causal"])
def test_fused_backbones_are_read_as_they_compute(name: str, base_dtype: Any, tmp_path: Path) -> None:
    """The ladder goes down from all levels in one product then, which may round otherwise than one by one."""
    model = sided(name, kernels="reference", base_dtype=base_dtype)
    assert all(isinstance(block, FusedBlock) for stack in stacks(model) for block in stack.blocks)
    inputs = batch(name)
    expected = gradients(model, inputs)
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(2):
            found, own = gradients(model, inputs)
            torch.testing.assert_close(found, expected[0], rtol=1e-6, atol=0)
            assert_same_gradients(own, expected[1])
        assert cache.counts.read == cache.counts.computed > 0


def pick(inputs: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """Some rows, without the columns that are padding in all of them."""
    some = {name: value[rows] for name, value in inputs.items()}
    width = int(some["attention_mask"].sum(1).max())
    return {
        name: value
        if name == "labels" and value.dim() == 1
        else value[:, :width]
        if value.shape == inputs["input_ids"].shape
        else value
        for name, value in some.items()
    }


@pytest.mark.parametrize("name", ["bert-classify", "bart-seq2seq", "t5-seq2seq", "llama-causal"])
def test_rows_are_met_again_in_any_order_and_any_batch(name: str, tmp_path: Path) -> None:
    model, inputs = sided(name), batch(name)
    orders = [[2, 0], [1], [0, 1], [2]]
    expected = [gradients(model, pick(inputs, rows)) for rows in orders]
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, inputs)
        cache.counts = Counts()
        for rows, (loss, grads) in zip(orders, expected, strict=True):
            found, own = gradients(model, pick(inputs, rows))
            torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
            for place, value in grads.items():
                torch.testing.assert_close(own[place], value, rtol=1e-5, atol=1e-6)
        assert cache.counts.computed == 0 and cache.counts.passed_by == 0


def test_a_batch_of_old_and_new_rows_is_computed_whole_and_then_known(tmp_path: Path) -> None:
    name = "llama-causal"
    model, inputs = sided(name), batch(name)
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, pick(inputs, [0]))
        gradients(model, inputs)
        assert (cache.counts.read, cache.counts.computed) == (0, 4)
        gradients(model, inputs)
        assert (cache.counts.read, cache.counts.computed) == (3, 4)


def test_a_pass_waits_once_for_what_all_stacks_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU: copies of both stacks are begun before any is waited for or written."""
    said: list[str] = []
    fetch, write, gpu = StackLevels.fetch, RowStore.write, torch.device("cuda", 0)
    waits = SimpleNamespace(synchronize=lambda: said.append("waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waits)
    monkeypatch.setattr(StackLevels, "fetch", lambda self: (said.append("copies"), fetch(self), gpu)[2])
    monkeypatch.setattr(RowStore, "write", lambda *args: (said.append("writes"), write(*args))[1])
    model, one = sided("bart-seq2seq"), batch("bart-seq2seq")
    with ActivationCache(model, tmp_path):
        model(**one)
    assert said == ["copies"] * 2 + ["waits"] + ["writes"] * 2 * len(one["input_ids"])


def test_a_row_of_the_decoder_is_known_by_its_input_too(tmp_path: Path) -> None:
    name = "bart-seq2seq"
    model, inputs = sided(name), batch(name)
    other = inputs | {"input_ids": inputs["input_ids"].roll(1, 0)}
    other["attention_mask"] = inputs["attention_mask"].roll(1, 0)
    expected = gradients(model, other)
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, inputs)
        found = gradients(model, other)
        assert (cache.counts.read, cache.counts.computed) == (3, 9)  # the encoder's rows are old ones
    torch.testing.assert_close(found[0], expected[0])


def padded_in_front(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows behind two columns of padding."""
    found = {
        name: torch.cat([value[:, :2] * 0, value], 1) if value.dim() == 2 else value
        for name, value in inputs.items()
    }
    if found["labels"].dim() == 2:
        found["labels"][:, :2] = -100
    return found


@pytest.mark.parametrize("name", ["bert-classify", "llama-causal"])
def test_the_place_of_a_rows_first_token_is_part_of_what_it_is_known_by(name: str, tmp_path: Path) -> None:
    model, inputs = sided(name), batch(name)
    left = padded_in_front(pick(inputs, [1]))
    expected = gradients(model, left)
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, pick(inputs, [1]))
        assert_equal(gradients(model, left), expected)
        assert cache.counts.read == 0


def test_a_row_that_is_padded_in_front_is_read_where_it_stands(tmp_path: Path) -> None:
    model = sided("llama-causal")
    left = padded_in_front(pick(batch("llama-causal"), [1]))
    expected = gradients(model, left)
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(2):
            assert_equal(gradients(model, left), expected)
        assert (cache.counts.read, cache.counts.computed) == (1, 1)


def test_packed_rows_are_met_again_whatever_fills_them_up(tmp_path: Path) -> None:
    model = sided("llama-causal").train()
    ids, positions = torch.randint(3, 40, (1, 8)), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    pad = model.config.pad_token_id = 0
    fill = torch.full((1, 3), pad)
    wide = {
        "input_ids": torch.cat([ids, fill], 1),
        "position_ids": torch.cat([positions, torch.arange(3)[None]], 1),
        "labels": torch.cat([ids, fill * 0 - 100], 1),
        "use_cache": False,
    }
    narrow = {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}
    expected = gradients(model, wide)
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, narrow)
        found = gradients(model, wide)
        assert (cache.counts.read, cache.counts.computed) == (1, 1)
    torch.testing.assert_close(found[0], expected[0])


def test_a_tail_of_real_pad_tokens_is_part_of_a_packed_row(tmp_path: Path) -> None:
    model = sided("llama-causal").train()
    model.config.pad_token_id = 0
    ids = torch.tensor([[5, 6, 7, 0, 0]])  # the end of a text that ends in tokens like padding
    inputs = {"input_ids": ids, "position_ids": torch.arange(5)[None], "labels": ids, "use_cache": False}
    expected = gradients(model, inputs)
    with ActivationCache(model, tmp_path):
        for _ in range(2):
            assert_equal(gradients(model, inputs), expected)


def test_the_untouched_base_is_read_too(tmp_path: Path) -> None:
    name = "bert-classify"
    model, inputs = sided(name), batch(name)
    with without_tuning(model), torch.no_grad():
        expected = model(**inputs).logits
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, inputs)
        with without_tuning(model), torch.no_grad():
            assert torch.equal(model(**inputs).logits, expected)
        assert cache.counts.read == 3


def test_a_model_is_pickled_once_its_cache_is_closed(tmp_path: Path) -> None:
    model = sided("llama-causal")
    with ActivationCache(model, tmp_path):
        for part in (model, model.model):
            with pytest.raises(UsageError, match="close the cache first"):
                torch.save(part, tmp_path / "model.pt")
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_equal(*(gradients(one, batch("llama-causal")) for one in (other, model)))


def test_a_copy_of_the_model_computes(tmp_path: Path) -> None:
    name = "llama-causal"
    model, inputs = sided(name), batch(name)
    with ActivationCache(model, tmp_path) as cache:
        expected = gradients(model, inputs)
        other = copy.deepcopy(model)
        assert all(stack.levels is None for stack in stacks(other))
        assert_equal(gradients(other, inputs), expected)
        assert cache.counts.read == 0
        assert_equal(gradients(model, inputs), expected)
        assert cache.counts.read == 3


# ------------------------------------------------------------------ how it is stored


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 0.0), ("bf16", 0.02), ("fp8", 0.15)])
def test_a_narrower_cache_rounds_as_its_dtype_does(dtype: Any, tolerance: float, tmp_path: Path) -> None:
    name = "llama-causal"
    model, inputs = sided(name), batch(name)
    loss, grads = gradients(model, inputs)
    with ActivationCache(model, tmp_path, dtype) as cache:
        gradients(model, inputs)
        found, own = gradients(model, inputs)
        assert cache.counts.read == 3
        tokens = int(inputs["attention_mask"].sum())
        assert cache.nbytes == tokens * 2 * {"fp32": 256, "bf16": 128, "fp8": 64 + 4}[dtype]
    assert float((found - loss).abs()) <= tolerance * float(loss)
    for place, value in grads.items():
        assert float((own[place] - value).norm()) <= 4 * tolerance * float(value.norm()) + 1e-9, place


@pytest.mark.parametrize("end", ["residual", "paper", "blend"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_pass_that_rounds_a_row_computes_as_those_that_read_it(
    dtype: Any, end: str, tmp_path: Path
) -> None:
    """Else a loss would say who has met a row first."""
    for name in ("llama-causal", "t5-seq2seq"):
        model, inputs = sided(name, end=end), batch(name)
        with ActivationCache(model, tmp_path / name, dtype) as cache:
            first, again = gradients(model, inputs), gradients(model, inputs)
            assert cache.counts.computed and cache.counts.read
        assert_equal(again, first)


@pytest.mark.parametrize("name", ["llama-causal", "vit-classify"])
def test_bfloat16_is_stored_as_it_is(name: str, tmp_path: Path) -> None:
    model = wrap(tiny(name).bfloat16(), "side", reduction=4, also_train=())
    given = batch(name)
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in given.items()}
    expected = gradients(model, inputs)
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(2):
            assert_equal(gradients(model, inputs), expected)
        assert cache.counts.read == 3


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("llama-causal", "reference"),
        ("t5-seq2seq", "off"),
        pytest.param("llama-causal", "off", marks=pytest.mark.long),
        pytest.param("t5-seq2seq", "reference", marks=pytest.mark.long),
    ],
)
def test_what_no_level_reads_is_not_stored(name: str, kernels: str, tmp_path: Path) -> None:
    """But for what the last block gives. Ladders beside other blocks have rows of their own."""
    depth = "num_layers" if name == "t5-seq2seq" else "num_hidden_layers"
    inputs, sizes = batch(name), []
    for kind in ({"layers": [0, 1]}, {"layers": [1, 2]}, {"layers": [1]}, {}, {"end": "blend"}):
        settings = {"reduction": 4, "also_train": (), "kernels": kernels, **kind}
        model = wrap(tiny(name, **{depth: 4}), "side", **settings)
        stir(model, std=0.2)
        expected = gradients(model, inputs)
        with without_tuning(model):
            base = model(**inputs).loss
        calls = count_blocks(model)
        with ActivationCache(model, tmp_path) as cache:
            for _ in range(2):
                found = gradients(model, inputs)
                torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
                assert_same_gradients(found[1], expected[1])
            with without_tuning(model):
                assert torch.equal(model(**inputs).loss, base)
            assert len(calls) == sum(map(len, stacks(model)))
            sizes.append(cache.nbytes)
            if name == "llama-causal":  # one stack
                tokens, (stack,) = int(inputs["attention_mask"].sum()), stacks(model)
                assert cache.nbytes == stack_bytes(model, stack, "auto", torch.float32, tokens, 9)
    assert sizes[0] == sizes[1] and sizes[4] < sizes[2] < sizes[1] < sizes[3]


def test_the_model_inside_distributed_data_parallel_is_read(tmp_path: Path) -> None:
    name = "llama-causal"
    model, inputs = sided(name), batch(name)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        shared = nn.parallel.DistributedDataParallel(model)
        with ActivationCache(shared, tmp_path) as cache:
            for _ in range(2):
                shared(**inputs)
    finally:
        dist.destroy_process_group()
    assert cache.counts.read == cache.counts.computed > 0


def test_another_process_goes_on_with_what_is_there(tmp_path: Path) -> None:
    name = "t5-seq2seq"
    inputs = batch(name)
    with ActivationCache(sided(name), tmp_path):
        pass
    first = sided(name)
    with ActivationCache(first, tmp_path):
        expected = gradients(first, inputs)
    again = sided(name)
    with ActivationCache(again, tmp_path) as cache:
        assert_equal(gradients(again, inputs), expected)
        assert cache.counts.computed == 0


def test_a_base_with_one_other_weight_has_rows_of_its_own(tmp_path: Path) -> None:
    name = "bert-classify"
    inputs = batch(name)
    with ActivationCache(sided(name), tmp_path) as cache:
        gradients(cache.models[0], inputs)
    other = sided(name)
    with torch.no_grad():
        stacks(other)[0].blocks[1].output.dense.weight[0, 0] += 1
    expected = gradients(other, inputs)
    with ActivationCache(other, tmp_path) as cache:
        assert_equal(gradients(other, inputs), expected)
        assert cache.counts.read == 0


def test_a_base_that_changes_while_a_cache_is_open_is_refused(tmp_path: Path) -> None:
    model, inputs = sided("llama-causal"), batch("llama-causal")
    weight = stacks(model)[0].blocks[1].mlp.up_proj.weight
    with ActivationCache(model, tmp_path) as cache:
        model(**inputs)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same values, written again
        model(**inputs)
        assert cache.counts.read == cache.counts.computed
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(UsageError, match="was changed while an activation cache was open") as caught:
            model(**inputs)
        assert "layers.1.mlp.up_proj.weight" in str(caught.value)
    model = tiny("llama-classify").requires_grad_(False)
    with ActivationCache(model, tmp_path):
        model(**batch("llama-classify"))
        stacks(model)[0].blocks[1].requires_grad_(True)
        with pytest.raises(UsageError, match="this tensor of it trains"):
            model(**batch("llama-classify"))


def test_rows_under_autocast_are_others_than_those_without_it(tmp_path: Path) -> None:
    model, inputs = sided("bert-classify"), batch("bert-classify")

    def losses() -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(**inputs).loss
        return [narrow.item(), model(**inputs).loss.item()]

    expected = losses()
    assert expected[0] != expected[1]
    with ActivationCache(model, tmp_path) as cache:
        assert losses() == losses() == expected
        assert cache.counts.read == cache.counts.computed


def test_types_of_tokens_are_not_taken_for_their_positions() -> None:
    model, ids, numbers = tiny("bert-classify"), torch.tensor([[5, 6]]), torch.tensor([[0, 1]])
    keys = [
        rows["input"][0][0].key
        for name in ("token_type_ids", "position_ids")
        if (rows := sources_of(model, {"input_ids": ids, name: numbers}))
    ]
    assert len(set(keys)) == 2


def test_rows_of_another_dtype_are_refused(tmp_path: Path) -> None:
    name = "bert-classify"
    with ActivationCache(sided(name), tmp_path) as cache:
        gradients(cache.models[0], batch(name))
    with pytest.raises(FileError, match="rows of another kind"):
        ActivationCache(sided(name), tmp_path, "fp8")


# ------------------------------------------------------------------ a head alone


def headed(name: str, **changes: Any) -> Any:
    """A model of the zoo, in training mode, of which nothing but the head trains."""
    model = tiny(name, **changes).train()
    model.base_model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("bert-classify", "t5-classify"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("bart-classify", "llama-classify")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3-classify", "bert-tokens")),
    ],
)
def test_a_head_behind_a_frozen_model_learns_as_without_a_cache(name: str, tmp_path: Path) -> None:
    model, batches = headed(name), [batch(name, seed=seed) for seed in (1, 2)]
    expected = [gradients(model, one) for one in batches]
    assert expected[0][1], "a head has gradients"
    kinds, modes = [type(one) for one in model.modules()], [one.training for one in model.modules()]
    with ActivationCache(model, tmp_path) as cache:
        calls, parts = count_blocks(model), stacks(model)
        for _ in range(3):
            for one, right in zip(batches, expected, strict=True):
                assert_equal(gradients(model, one), right)
        assert len(calls) == sum(len(stack) for stack in parts) * len(batches)
        assert cache.counts.read == 2 * cache.counts.computed > 0
        kept = sorted(len(level.kept) for level in cache.levels[model].values())
        assert kept == [0, 1][-len(kept) :], "the last level of the last stack alone is stored"
    assert [type(one) for one in model.modules()] == kinds and not stacks(model)
    assert [one.training for one in model.modules()] == modes


def test_blocks_in_front_of_a_head_draw_no_masks(tmp_path: Path) -> None:
    model = headed("bert-classify", hidden_dropout_prob=0.5, classifier_dropout=0.0)
    inputs, modes = batch("bert-classify"), [one.training for one in model.modules()]
    model.base_model.eval()
    expected = gradients(model, inputs)
    model.train()
    with ActivationCache(model, tmp_path):
        for _ in range(2):
            assert_equal(gradients(model, inputs), expected)
        model(**inputs, output_hidden_states=True)
    assert [one.training for one in model.modules()] == modes and all(modes)


def test_a_head_of_ones_own_is_put_on_an_encoder_that_is_read(tmp_path: Path) -> None:
    encoder, inputs = tiny("bert-classify").bert.requires_grad_(False), batch("bert-classify")
    inputs.pop("labels")
    expected = encoder(**inputs).last_hidden_state
    with ActivationCache(encoder, tmp_path) as cache:
        found = [encoder(**inputs).last_hidden_state for _ in range(2)]
    real = inputs["attention_mask"].bool()
    assert torch.equal(found[0], expected) and torch.equal(found[1][real], expected[real])
    assert not found[1][~real].any(), "padding is not stored"
    assert cache.counts.read == cache.counts.computed == len(expected)


def test_a_ladder_and_a_head_on_one_base_have_rows_of_their_own(tmp_path: Path) -> None:
    model, ladder, inputs = headed("llama-classify"), wrap(tiny("llama-classify"), "side", reduction=4), {}
    inputs = batch("llama-classify")
    for one in (model, ladder, model):
        expected = gradients(one.eval(), inputs)
        with ActivationCache(one, tmp_path) as cache:
            assert_equal(gradients(one, inputs), expected)
    assert cache.counts.computed == 0


# ------------------------------------------------------------------ what is passed by, and what is refused


@pytest.mark.parametrize("name", GENERATING)
def test_generation_computes(name: str, tmp_path: Path) -> None:
    model, inputs = sided(name), batch(name)
    prompt = {key: inputs[key][:1] for key in ("input_ids", "attention_mask")}
    expected = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    with ActivationCache(model, tmp_path):
        gradients(model, inputs)
        assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_what_a_user_wants_to_see_of_blocks_is_computed(asked: str, tmp_path: Path) -> None:
    name = "bert-classify"
    model, inputs = sided(name), batch(name)
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, inputs)
        model(**inputs, **{asked: True})
        assert (cache.counts.read, cache.counts.passed_by) == (0, 1)
        model.set_attn_implementation("eager")
        setattr(model.config, asked, True)
        model(**inputs)
        assert (cache.counts.read, cache.counts.passed_by) == (0, 2)


def test_embeddings_in_the_place_of_tokens_are_no_rows() -> None:
    model = sided("bert-classify")
    assert sources_of(model, {"inputs_embeds": torch.zeros(1, 2, 64)}) is None


@pytest.mark.parametrize("method", ["lora", "adapter"])
def test_methods_that_change_blocks_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is for ladders"):
        ActivationCache(wrap(tiny("bert-classify"), method), tmp_path)


def test_a_model_that_is_not_wrapped_and_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this tensor of it trains"):
        ActivationCache(tiny("bert-classify"), tmp_path)
    with pytest.raises(UsageError, match="needs a model family"):
        ActivationCache(nn.Linear(2, 2).requires_grad_(False), tmp_path)


def test_a_backbone_of_which_something_trains_is_refused(tmp_path: Path) -> None:
    model = tiny("bert-classify").requires_grad_(False)
    model.get_parameter("bert.embeddings.word_embeddings.weight").requires_grad_(True)
    with pytest.raises(UsageError, match="this tensor of it trains") as caught:
        ActivationCache(model, tmp_path)
    assert "word_embeddings" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "behind"), [("llama-causal", "model.norm"), ("bert-classify", "bert.pooler")]
)
def test_what_works_behind_the_last_block_may_train_beside_a_ladder(
    name: str, behind: str, tmp_path: Path
) -> None:
    model, inputs = sided(name, also_train=(behind,)), batch(name)
    expected, calls = gradients(model, inputs), count_blocks(model)
    assert any(key.startswith(behind) for key in expected[1])
    with ActivationCache(model, tmp_path):
        for _ in range(2):
            assert_equal(gradients(model, inputs), expected)
    assert len(calls) == 2


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown"):
        ActivationCache(sided("bert-classify"), tmp_path, "fp16")  # type: ignore[arg-type]
