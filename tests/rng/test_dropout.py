"""Masks drawn by index: equal whatever slice is held, random in every direction, and in the place of torch's
own inside models."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models import family_of
from petune.models.stack import own_stacks
from petune.rng.context import Running, bound, bound_to, running
from petune.rng.dropout import drawing, drop, drop_attention, step_key
from tests.methods.zoo import assert_same_gradients, batch, tiny

KEY = step_key(0, 0)
SIZES = (6, 7, 10)
PINNED_KEY = 6804074658870690613  # of seed 1, step 2
# a word of features per token
PINNED_MASK = [0x0FF26F58, 0xA4814D13, 0xC0C388CE, 0xF8E827B0, 0xF32EE888, 0x1F01755A]


def mask(*shape: int, p: float = 0.4, device: str = "cpu", **facts: Any) -> Tensor:
    """The mask `drop` draws for a tensor of this shape, under `facts`."""
    with bound_to(Running(**{"key": KEY, "site": "decoder.3", **facts})):
        return drop(torch.ones(shape, device=device), p) != 0


# ------------------------------------------------------------------ a slice is a slice of the whole


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[int], slice, slice]:
    """Any rows in any order, and a range of tokens and of features, empty ones included."""
    rows = draw(st.lists(st.integers(0, SIZES[0] - 1), unique=True))
    ranges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SIZES[1:]]
    return rows, slice(*ranges[0]), slice(*ranges[1])


@settings(max_examples=60, deadline=None)
@given(pieces(), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_mask_of_a_slice_is_the_slice_of_the_mask(
    piece: tuple[list[int], slice, slice], p: float
) -> None:
    rows, tokens, features = piece
    x = torch.arange(1.0, 1 + math.prod(SIZES)).view(SIZES)
    with bound_to(Running(key=KEY, site="encoder.0")):
        whole, pooled = drop(x, p), drop(x[:, 0], p)
    with bound_to(
        Running(
            key=KEY,
            site="encoder.0",
            rows=torch.tensor(rows, dtype=torch.int64),
            token=tokens.start,
            feature=features.start,
        )
    ):
        assert torch.equal(drop(x[rows, tokens, features], p), whole[rows, tokens, features])
        assert torch.equal(drop(x[rows, 0, features], p), pooled[rows, features])


@settings(max_examples=40, deadline=None)
@given(pieces())
def test_attention_probabilities_of_some_heads_and_queries_keep_their_mask(
    piece: tuple[list[int], slice, slice],
) -> None:
    rows, heads, queries = piece
    x = torch.arange(1.0, 1 + math.prod(SIZES) * 5).view(*SIZES, 5)
    with bound_to(Running(key=KEY)):
        whole = drop_attention(x, 0.3, 0, 0)
    with bound_to(Running(key=KEY, rows=torch.tensor(rows, dtype=torch.int64), token=3, feature=2)):
        assert torch.equal(
            drop_attention(x[rows, heads, queries], 0.3, heads.start, queries.start),
            whole[rows, heads, queries],
        )


def test_probabilities_dropped_by_the_model_itself_get_the_mask_of_drop_attention() -> None:
    x = torch.ones(2, 3, 4, 5)
    with drawing(Running(key=KEY)):
        found = F.dropout(x, 0.3)
    with bound_to(Running(key=KEY)):
        assert torch.equal(found, drop_attention(x, 0.3, 0, 0))


def test_rows_laid_one_behind_the_other_keep_their_mask() -> None:
    x = torch.ones(3, 5, 4)
    with bound(key=1, site="s", rows=torch.tensor([4, 2, 9])):
        expected = drop(x, 0.5)
    with bound(key=1, site="s", rows=torch.tensor([4, 2, 9])):
        assert torch.equal(drop(x.flatten(0, 1), 0.5), expected.flatten(0, 1))


def test_rows_without_numbers_are_numbered_from_nought() -> None:
    assert torch.equal(mask(*SIZES), mask(*SIZES, rows=torch.arange(SIZES[0])))


@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (12,), ()])
def test_a_tensor_whose_first_dim_is_not_the_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"decoder\.3 (.|\n)*by index(.|\n)*set that dropout to 0"):
        mask(*shape, rows=torch.arange(3))


@pytest.mark.parametrize("cut", [{"token": 2}, {"feature": 2}])
def test_four_dims_in_a_cut_block_are_refused(cut: dict[str, int]) -> None:
    """Which of the dims was cut cannot be told; attention under a cut goes by drop_attention."""
    with pytest.raises(UsageError, match="whose blocks are cut"):
        mask(2, 3, 4, 5, **cut)


# ------------------------------------------------------------------ what a draw does


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_values_are_scaled_and_the_gradient_has_the_mask(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    with bound_to(Running(key=KEY, site="decoder.3")):
        y = drop(x, 0.4)
    y.sum().backward()
    kept = mask(4, 8, 16)
    assert y.dtype == dtype
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(y, torch.where(kept, x / 0.6, 0.0))
    torch.testing.assert_close(x.grad, torch.where(kept, 1 / 0.6, 0.0).to(dtype))


def test_the_gradient_of_the_gradient_is_right() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def dropped(x: Tensor) -> Tensor:
        with bound_to(Running(key=KEY)):
            return drop(x, 0.4) ** 2

    assert torch.autograd.gradcheck(dropped, x)
    assert torch.autograd.gradgradcheck(dropped, x)


def test_nothing_goes_at_zero_and_everything_at_one() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with bound_to(Running(key=KEY)) as now:
        assert drop(x, 0) is x
        assert now.drawn == 0
        gone = drop(x, 1)
    assert torch.equal(gone, torch.zeros(3, 4))
    gone.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="between 0 and 1"), drawing(Running(key=KEY)):
        F.dropout(x, 1.5)


def test_a_probability_that_rounds_to_one_is_still_a_threshold() -> None:
    assert not mask(100, 100, p=1 - 1e-12).any()
    assert mask(100, 100, p=1e-12).all()


def test_each_draw_of_a_site_is_another_and_the_count_says_which() -> None:
    with bound_to(Running(key=KEY, site="decoder.3")) as now:
        first, second = (drop(torch.ones(4, 64), 0.5) for _ in range(2))
        assert now.drawn == 2
        assert not torch.equal(first, second)
        now.drawn = 0
        assert torch.equal(drop(torch.ones(4, 64), 0.5), first)
    assert torch.equal(second != 0, mask(4, 64, p=0.5, drawn=1))


def test_an_empty_slice_counts_as_a_draw_too() -> None:
    """A rank without columns must stay in step with the others."""
    with bound_to(Running(key=KEY)) as now:
        assert drop(torch.ones(4, 3, 0), 0.5).shape == (4, 3, 0)
        assert drop(torch.ones(4, 0, 3), 0.5).shape == (4, 0, 3)
        assert now.drawn == 2


def test_keys_are_63_bits_of_seed_and_step() -> None:
    keys = {step_key(seed, step) for seed in range(50) for step in range(50)}
    assert len(keys) == 2500
    assert all(0 <= key < 2**63 for key in keys)
    assert step_key(2**32 - 1, 10**9) != step_key(2**32 - 2, 10**9)


def test_masks_are_those_of_every_process_machine_and_version() -> None:
    """A run that is taken up again must draw what it would have drawn; Python's salted hash must not come
    in."""
    assert step_key(1, 2) == PINNED_KEY
    drawn = mask(
        2,
        3,
        32,
        p=0.5,
        key=PINNED_KEY,
        site="encoder.11",
        drawn=4,
        rows=torch.tensor([5, 70000]),
        token=9,
        feature=3,
    )
    assert [int("".join(str(int(bit)) for bit in row), 2) for row in drawn.flatten(0, 1)] == PINNED_MASK


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_on_a_gpu_are_those_of_the_cpu() -> None:
    for p in (0.1, 0.5, 0.9):
        assert torch.equal(mask(16, 300, 513, p=p, device="cuda").cpu(), mask(16, 300, 513, p=p))
        assert torch.equal(mask(2, 4, 60, 60, p=p, device="cuda").cpu(), mask(2, 4, 60, 60, p=p))


# ------------------------------------------------------------------ randomness

LARGE = (16, 256, 256)
STEPS = [step_key(seed, step) for seed in (0, 1) for step in (0, 1)]


def centred(p: float, **facts: Any) -> Tensor:
    """The mask of a million elements, with mean 0 and variance 1 if it is random."""
    return (mask(*LARGE, p=p, **facts).double() - (1 - p)) / math.sqrt(p * (1 - p))


def sigmas(product: Tensor) -> float:
    """How far the sum of independent terms of variance 1 is from 0, in its own standard deviations."""
    return abs(float(product.sum())) / math.sqrt(product.numel())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("key", STEPS)
def test_the_share_that_is_kept_is_as_asked(p: float, key: int) -> None:
    assert sigmas(centred(p, key=key)) < 4


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_in_every_direction_are_independent(p: float) -> None:
    z = centred(p)
    for far in (1, 2, 8):
        assert sigmas(z[far:] * z[:-far]) < 4, f"rows {far} apart"
        assert sigmas(z[:, far:] * z[:, :-far]) < 4, f"tokens {far} apart"
        assert sigmas(z[..., far:] * z[..., :-far]) < 4, f"features {far} apart"
    assert sigmas(z[:, 1:, 1:] * z[:, :-1, :-1]) < 4
    assert sigmas(z[:, 1:, :-1] * z[:, :-1, 1:]) < 4
    others = {"drawn": 1, "site": "decoder.4", "key": STEPS[1]} | {
        "rows": torch.arange(16, 32),
        "token": 256,
        "feature": 256,
    }
    for name, value in others.items():
        assert sigmas(z * centred(p, **{name: value})) < 4, name


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)])
def test_the_corners_of_a_rectangle_are_independent(p: float, axes: tuple[int, int]) -> None:
    """Three of them would fix the fourth if the axes were only added or xored together."""
    z = centred(p)
    for far in (1, 2, 4):
        a, b = z.roll(far, axes[0]), z.roll(far, axes[1])
        assert sigmas(z * a * b * a.roll(far, axes[1])) < 4


def test_the_corners_test_sees_a_sum_of_axes() -> None:
    bits = [torch.randint(0, 2, (size,)) for size in LARGE[1:]]
    z = 2.0 * (bits[0][:, None] ^ bits[1]) - 1
    assert sigmas(z * z.roll(1, 0) * z.roll(1, 1) * z.roll((1, 1), (0, 1))) > 100


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_sums_over_any_axes_spread_as_sums_of_independent_draws_do(p: float) -> None:
    z = centred(p)
    for dims in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        sums = z.sum(dims)
        # chi-square with one degree of freedom each, nearly
        squares = sums.square() / (z.numel() / sums.numel())
        assert abs(float(squares.sum()) - sums.numel()) / math.sqrt(2 * sums.numel()) < 4, dims


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_no_wave_stands_out(p: float) -> None:
    """Powers of a random field's waves are exponential: the largest of n passes ln n + 12 once in 160,000
    times."""
    z = centred(p)
    powers = torch.fft.fftn(z).abs().square() / z.numel()
    assert float(powers.max()) < math.log(z.numel()) + 12


# ------------------------------------------------------------------ in place of torch's own

SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: F.dropout(x, 0.4),
    "functional with its default": lambda x: F.dropout(x, p=0.4, training=True, inplace=False),
    "module": lambda x: nn.Dropout(0.4)(x),
    "module in place": lambda x: nn.Dropout(0.4, inplace=True)(x.clone()),
    "torch": lambda x: torch.dropout(x, 0.4, True),
    "torch by keyword": lambda x: torch.dropout(input=x, p=0.4, train=True),
    "torch in place": lambda x: torch.dropout_(x.clone(), 0.4, True),
    "nested": lambda x: _nested(x),
}


def _nested(x: Tensor) -> Tensor:
    with drawing(running()):
        return F.dropout(x, 0.4)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dropout_is_drawn_by_index_however_it_is_called(spelling: str) -> None:
    x = torch.randn(4, 8, 16)
    with drawing(Running(key=KEY, site="decoder.3")):
        assert torch.equal(SPELLINGS[spelling](x) != 0, mask(4, 8, 16))


def test_dropout_in_place_changes_the_tensor_it_is_given() -> None:
    x = torch.ones(4, 16)
    with drawing(Running(key=KEY, site="decoder.3")):
        assert F.dropout(x, 0.4, inplace=True) is x
    assert torch.equal(x != 0, mask(4, 16))


def test_dropout_that_is_off_stays_off_and_does_not_count() -> None:
    x = torch.ones(4, 16)
    with drawing(Running(key=KEY)):
        assert F.dropout(x, 0.4, training=False) is x
        assert nn.Dropout(0.4).eval()(x) is x
        assert F.dropout(x, 0.0) is x
        assert running().drawn == 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_without_a_key_torch_draws(spelling: str) -> None:
    x = torch.randn(4, 8, 16)
    torch.manual_seed(3)
    expected = SPELLINGS[spelling](x)
    torch.manual_seed(3)
    with drawing(Running(site="decoder.3")):
        assert torch.equal(SPELLINGS[spelling](x), expected)
    with drawing(Running(key=KEY)), drawing(Running()):
        torch.manual_seed(3)
        assert torch.equal(SPELLINGS[spelling](x), expected)
        F.alpha_dropout(x, 0.4, True)
    for call in (lambda: drop(x, 0.4), lambda: drop_attention(x, 0.4, 0, 0)):
        torch.manual_seed(3)
        assert torch.equal(call(), expected)


HEADS = torch.randn(2, 2, 3, 4)
REFUSED: dict[str, Callable[[float, bool], Any]] = {
    "alpha_dropout": lambda p, on: nn.AlphaDropout(p).train(on)(HEADS),
    "feature_alpha_dropout": lambda p, on: F.feature_alpha_dropout(HEADS, p, on),
    "dropout1d": lambda p, on: nn.Dropout1d(p).train(on)(HEADS[0]),
    "dropout2d": lambda p, on: F.dropout2d(HEADS, p, on),
    "dropout3d": lambda p, on: F.dropout3d(HEADS[None], p=p, training=on),
    "scaled_dot_product_attention": lambda p, on: F.scaled_dot_product_attention(
        HEADS, HEADS, HEADS, dropout_p=p if on else 0.0
    ),
    "multi_head_attention_forward": lambda p, on: nn.MultiheadAttention(4, 2, dropout=p).train(on)(
        HEADS[0], HEADS[0], HEADS[0]
    ),
    "lstm": lambda p, on: nn.LSTM(4, 4, num_layers=2, dropout=p).train(on)(HEADS[0]),
    "gru": lambda p, on: nn.GRU(4, 4, num_layers=2, dropout=p).train(on)(HEADS[0]),
    "rnn_tanh": lambda p, on: nn.RNN(4, 4, num_layers=2, dropout=p).train(on)(HEADS[0]),
    "rnn_relu": lambda p, on: nn.RNN(4, 4, 2, "relu", dropout=p).train(on)(HEADS[0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_by_index_is_refused_by_name(name: str) -> None:
    with drawing(Running(key=KEY, site="decoder.3")):
        with pytest.raises(
            UsageError, match=rf"decoder\.3  dropout inside {name} cannot be drawn by index\n.*(use|set)"
        ):
            REFUSED[name](0.3, True)
        REFUSED[name](0.3, False)
        REFUSED[name](0.0, True)
    with drawing(Running()):
        REFUSED[name](0.3, True)


def test_attention_dropout_by_position_is_refused_too() -> None:
    with drawing(Running(key=KEY)), pytest.raises(UsageError, match=r"petune\.models\.attention\.use"):
        F.scaled_dot_product_attention(HEADS, HEADS, HEADS, None, 0.1)


def test_torch_draws_again_after_an_exception() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ZeroDivisionError), drawing(Running(key=KEY)), drawing(Running(key=KEY)):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), drawing(Running(key=KEY)):
        torch.ones(2) @ torch.ones(3)
    assert running().key is None
    F.alpha_dropout(x, 0.4, True)
    with drawing(Running(key=KEY)), pytest.raises(UsageError):
        F.alpha_dropout(x, 0.4, True)


def test_another_thread_is_left_alone() -> None:
    done: list[Tensor] = []
    with drawing(Running(key=KEY)):
        thread = Thread(target=lambda: done.append(F.alpha_dropout(torch.ones(2, 2), 0.4, True)))
        thread.start()
        thread.join()
    assert len(done) == 1


@pytest.mark.parametrize(
    "around", [nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_mask_does_not_depend_on_grad_mode_or_precision(around: Callable[[], Any]) -> None:
    layer = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.4))
    with around(), drawing(Running(key=KEY, site="decoder.3")):
        assert torch.equal(layer(torch.randn(4, 8, 16)) != 0, mask(4, 8, 64))


# ------------------------------------------------------------------ recomputation


def stacked(recompute: bool) -> Any:
    model = tiny(
        "bart-seq2seq",
        dropout=0.2,
        activation_dropout=0.2,
        attention_dropout=0.2,
        attn_implementation="eager",
    ).train()
    for stack in own_stacks(model, family_of(model)).values():  # type: ignore[arg-type]
        stack.recompute = recompute
    return model


def _here(loss: Tensor) -> None:
    loss.backward()


def _elsewhere(loss: Tensor) -> None:
    thread = Thread(target=loss.backward)
    thread.start()
    thread.join()


def _with_another_call_bound(loss: Tensor) -> None:
    with bound(key=1, site="other", drawn=9, token=3):
        loss.backward()


def _while_drawing(loss: Tensor) -> None:
    with drawing(Running(key=1, site="other", drawn=9)):
        loss.backward()
        with pytest.raises(UsageError):
            F.alpha_dropout(torch.ones(2, 2), 0.4, True)


@pytest.mark.parametrize("backward", [_here, _elsewhere, _with_another_call_bound, _while_drawing])
def test_a_recomputed_block_draws_the_masks_it_drew(backward: Callable[[Tensor], None]) -> None:
    inputs = batch("bart-seq2seq")
    found = {}
    for recompute in (False, True):
        model = stacked(recompute)
        with drawing(Running(key=KEY, rows=torch.arange(3))):
            loss = model(**inputs).loss
        F.dropout(torch.ones(4), 0.5)  # torch's own stream is somewhere else by now
        backward(loss)
        found[recompute] = {
            name: value.grad for name, value in model.named_parameters() if value.grad is not None
        }
    assert_same_gradients(found[True], found[False])


# ------------------------------------------------------------------ models

DROPPING: dict[str, dict[str, Any]] = {
    "bert-classify": {
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.2,
        "classifier_dropout": 0.2,
    },
    "bert-tokens": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "bart-seq2seq": {"dropout": 0.2, "activation_dropout": 0.2, "attention_dropout": 0.2},
    "bart-classify": {
        "dropout": 0.2,
        "activation_dropout": 0.2,
        "attention_dropout": 0.2,
        "classifier_dropout": 0.2,
    },
    "t5-seq2seq": {"dropout_rate": 0.2},
    "t5-classify": {"dropout_rate": 0.2, "classifier_dropout": 0.2},
    "llama-causal": {"attention_dropout": 0.2},
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", DROPPING)
def test_every_dropout_of_a_model_is_drawn_by_key_and_row_number(name: str, own: bool) -> None:
    model = tiny(name, attn_implementation="eager", **DROPPING[name]).train()
    if own:
        own_stacks(model, family_of(model))  # type: ignore[arg-type]
    inputs = batch(name, rows=4)

    def logits(rows: list[int], key: int = KEY, order: Tensor | None = None) -> Tensor:
        taken = inputs if order is None else {field: value[order] for field, value in inputs.items()}
        with drawing(Running(key=key, rows=torch.tensor(rows))):
            result: Tensor = model(**taken).logits
        return result

    torch.manual_seed(0)
    stream = torch.get_rng_state()
    found = logits([3, 4, 5, 6])
    assert torch.equal(logits([3, 4, 5, 6]), found)
    assert torch.equal(torch.get_rng_state(), stream), "something drew from torch's own stream"
    assert not torch.allclose(logits([3, 4, 5, 6], step_key(0, 1)), found)
    other = logits([3, 4, 9, 6])
    torch.testing.assert_close(other[[0, 1, 3]], found[[0, 1, 3]])
    assert not torch.allclose(other[2], found[2])
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(logits([5, 3, 6, 4], order=order), found[order], rtol=1e-5, atol=1e-5)


def test_blocks_of_a_stack_have_sites_of_their_own() -> None:
    """Else each block would repeat the masks of the one before."""
    model = tiny("bert-classify", hidden_dropout_prob=0.5, attn_implementation="eager").train()
    own_stacks(model, family_of(model))  # type: ignore[arg-type]
    seen: list[tuple[str, int]] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_pre_hook(lambda *_: seen.append((running().site, running().drawn)))
    with drawing(Running(key=KEY, rows=torch.arange(3))):
        model(**batch("bert-classify"))
    blocks = [(f"encoder.{block}", drawn) for block in range(2) for drawn in range(2)]
    assert seen == [("", 0), *blocks, ("after encoder", 0)]


def test_a_model_that_leaves_attention_dropout_to_torch_is_refused() -> None:
    model = tiny("bert-classify", attention_probs_dropout_prob=0.2, attn_implementation="sdpa").train()
    own_stacks(model, family_of(model))  # type: ignore[arg-type]
    with (
        pytest.raises(UsageError, match=r"encoder\.0 .*scaled_dot_product_attention"),
        drawing(Running(key=KEY)),
    ):
        model(**batch("bert-classify"))
