"""Streamed AdamW: its arithmetic against torch's, its copies against two adversaries, what it refuses.

On a CPU copies are made at once, which hides a missing wait. So `Late` makes each copy only when somebody
waits for it, and `Clocks` keeps vector clocks of the computation and of both directions and complains about
accesses that nothing orders.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petune.errors import UsageError
from petune.kernels.block import fold
from petune.kernels.block.module import FusedBlock
from petune.kernels.fuse import fuse
from petune.kernels.memory import offloaded_adamw
from petune.kernels.memory.adamw import AdamWStep, adamw_, random_bits, random_words, rounded
from petune.kernels.memory.offloaded_adamw import Event, HostTraffic, StreamedAdamW
from petune.kernels.triton import adamw as kernel
from petune.models import llama
from tests.methods.zoo import batch, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
WORDS = random_words(0, 1, "weight")
RULE = AdamWStep(1e-2, (0.9, 0.99), 1e-8, 0.1, 3)
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}

# ------------------------------------------------------------------ rounding


def test_a_value_between_two_bfloat16s_goes_to_either_and_is_right_on_average() -> None:
    for value in (1.0 + 0.3 * 2**-7, -3.0 - 0.3 * 2**-6):
        values = torch.full((200_000,), value)
        found = rounded(values, random_bits(WORDS, 0, len(values), values.device)[0], BF16).float()
        assert found.unique().numel() == 2
        step = float(found.max() - found.min())
        assert abs(float(found.double().mean()) - value) < 4 * step * (0.3 * 0.7 / len(values)) ** 0.5
    # which rounding to nearest is not
    assert float((values.to(BF16).float() - values).mean().abs()) > 0.2 * step


def test_what_bfloat16_holds_stays_and_so_does_what_is_no_number() -> None:
    chance = torch.full((6,), 0xFFFF, dtype=torch.int32)
    values = torch.tensor([0.0, -1.5, 2.0**100, float("inf"), -float("inf"), float("nan")])
    assert torch.equal(rounded(values[:5], chance[:5], BF16).float(), values[:5])
    # adding to these bits would make -0 of them
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(FP32)
    assert rounded(torch.cat([values[5:], all_ones]), chance[:2], BF16).isnan().all()


def test_random_bits_are_even_and_their_halves_know_nothing_of_each_other() -> None:
    one, two = random_bits(WORDS, 0, 100_000, torch.device("cpu"))
    halves = torch.stack([one >> 16 & 0xFFFF, one & 0xFFFF, two >> 16 & 0xFFFF]).double() / 2**16 - 0.5
    assert (halves.mean(1).abs() < 4 * (1 / 12 / 1e5) ** 0.5).all()
    assert (halves.cov() * 12 - torch.eye(3)).abs().max() < 0.02
    neighbours = torch.stack([halves[0, 1:], halves[0, :-1]]).corrcoef()[0, 1]
    assert abs(float(neighbours)) < 0.015


def test_bits_follow_from_seed_step_name_and_place() -> None:
    whole = random_bits(WORDS, 0, 100, torch.device("cpu"))
    part = random_bits(random_words(0, 1, "weight"), 37, 63, torch.device("cpu"))
    assert all(torch.equal(one[37:], other) for one, other in zip(whole, part, strict=True))
    others = [random_words(1, 1, "weight"), random_words(0, 2, "weight"), random_words(0, 1, "bias")]
    assert len({WORDS, *others}) == 4


# ------------------------------------------------------------------ the arithmetic


def operands(size: int, kept: torch.dtype, grad: torch.dtype) -> list[Tensor]:
    """weight, grad, mean, square as in the middle of a training."""
    generator = torch.Generator().manual_seed(size)
    weight, gradient, mean, square = torch.randn(4, size, generator=generator)
    return [
        tensor.to(DEVICE, dtype)
        for tensor, dtype in ((weight, kept), (gradient, grad), (mean / 3, kept), (square**2 / 9, kept))
    ]


def test_in_float32_it_is_torchs_adamw() -> None:
    parameter = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.AdamW([parameter], RULE.lr, RULE.betas, RULE.eps, RULE.decay, foreach=False)
    weight, mean, square = parameter.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 5):
        parameter.grad = torch.randn(1000)
        adamw_(weight, parameter.grad, mean, square, RULE._replace(step=step), WORDS)
        optimizer.step()
        assert torch.equal(weight, parameter)


def test_steps_too_small_for_bfloat16_are_made_on_average() -> None:
    exact, grad = torch.linspace(1, 2, 4096), torch.ones(4096)
    exact = exact.to(BF16).float()
    # a step is 1/80 of a bfloat16's spacing here
    weight, rule = exact.to(BF16), AdamWStep(1e-4, (0.9, 0.999), 1e-8, 0.0, 1)
    states = torch.zeros(2, 4096)
    for step in range(1, 101):
        adamw_(weight, grad, *states, rule._replace(step=step), random_words(0, step, "weight"))
    moved = float((weight.float() - exact).mean())
    assert moved == pytest.approx(-1e-2, rel=0.05)
    assert torch.equal((exact - 1e-4).to(BF16).float(), exact)  # rounded to nearest, none would have moved


@pytest.mark.parametrize(
    ("kept", "grad", "copied"),
    [(FP32, FP32, False), (FP32, BF16, True), (BF16, BF16, False), (BF16, FP32, False)],
)
@pytest.mark.parametrize("size", [1, 2048, 5001])
def test_the_kernel_is_the_reference(kept: torch.dtype, grad: torch.dtype, copied: bool, size: int) -> None:
    """Square root and division differ in the last place of float32, so a bfloat16 may fall on the other side
    of a throw of the dice."""
    results = []
    for function in (adamw_, kernel.adamw_):
        tensors = operands(size, kept, grad)
        copy = torch.zeros(size, dtype=BF16, device=DEVICE) if copied else None
        function(*tensors, RULE, WORDS, 12_345, copy)
        results.append([*tensors, *([] if copy is None else [copy])])
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        if expected.dtype == FP32:
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)
        else:
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
            assert int((found != expected).sum()) <= 1 + size // 500


def test_the_kernel_takes_nothing_and_keeps_what_is_no_number() -> None:
    kernel.adamw_(*operands(0, BF16, BF16), RULE, WORDS)
    tensors = operands(4, BF16, BF16)
    tensors[1][2] = float("nan")
    kernel.adamw_(*tensors, RULE, WORDS)
    assert tensors[0].isnan().tolist() == [False, False, True, False]


# ------------------------------------------------------------------ training


def made(dtype: torch.dtype = FP32, device: str = "cpu", **changes: Any) -> tuple[Any, list[nn.Module]]:
    """A fused Llama of four blocks, and them."""
    model = tiny("llama-causal", **{"num_hidden_layers": 4, **changes}).to(device, dtype).train()
    assert fuse(model, llama.FAMILY, "auto" if device == "cuda" else "reference")
    return model, [module for module in model.modules() if isinstance(module, FusedBlock)]


def inputs(step: int, device: str = "cpu") -> dict[str, Tensor]:
    """A batch of its own for each step."""
    return {name: value.to(device) for name, value in batch("llama-causal", seed=10 + step).items()}


def groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters as torch's AdamW takes them, vectors without decay."""
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        kinds[parameter.dim() > 1].append(parameter)
    return [{"params": kinds[True]}, {"params": kinds[False], "weight_decay": 0.0}]


def trained(steps: int = 3, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of torch's AdamW on the same model."""
    model, _ = made(**changes)
    optimizer = torch.optim.AdamW(groups(model.parameters()), **SETTINGS, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(stepped(model, optimizer, step))
    return losses, model.state_dict()


def stepped(model: Any, optimizer: Any, step: int) -> float:
    """One step; its loss."""
    loss = model(**inputs(step)).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def states_of(optimizer: StreamedAdamW) -> dict[str, dict[str, Tensor]]:
    """The states in `state_dict`, by name of the parameter."""
    found = optimizer.state_dict()
    names = [optimizer.names[value] for group in optimizer.param_groups for value in group["params"]]
    return {
        name: {key: value for key, value in found["state"][at].items() if key != "step"}
        for at, name in enumerate(names)
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.crossed(1)
@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize(
    "changes",
    [{}, {"vocab_size": 1500}, {"tie_word_embeddings": True}],
    ids=["", "head-beyond-a-slot", "tied"],
)
def test_training_is_torchs_to_the_bit(changes: dict[str, Any], slots: int) -> None:
    model, blocks = made(**changes)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32, slots=slots)
    losses = [stepped(model, optimizer, step) for step in range(3)]
    expected, weights = trained(**changes)
    assert losses == expected
    assert_same(model.state_dict(), weights)


def test_without_fused_blocks_training_is_the_same_too() -> None:
    """A block of anyone's that is one node; here with a weight that makes no difference, and so has no
    gradient."""
    losses: dict[bool, list[Tensor]] = {True: [], False: []}
    for streams, seen in losses.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), *(OneNode() for _ in range(3)), nn.Linear(4, 1))
        optimizer: Any = StreamedAdamW(model, list(model)[1:4], **SETTINGS, states=FP32) if streams else None
        optimizer = optimizer or torch.optim.AdamW(groups(model.parameters()), **SETTINGS, foreach=False)
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
    assert losses[True] == losses[False]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, idle: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return dy @ weight.T, x.T @ dy, None


class OneNode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.idle = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Product.apply(x, self.weight, self.idle)
        return found


def test_float32_masters_are_mixed_precision_training() -> None:
    """torch's AdamW on float32 weights, of which the model has what bfloat16 holds."""
    model, blocks = made(BF16)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    losses = [stepped(model, optimizer, step) for step in range(3)]
    other, _ = made(BF16)
    masters = {name: nn.Parameter(value.detach().float()) for name, value in other.named_parameters()}
    peer = torch.optim.AdamW(groups(masters.values()), **SETTINGS, foreach=False)
    for step in range(3):
        other.zero_grad()
        loss = other(**inputs(step)).loss
        assert float(loss.detach()) == losses[step]
        loss.backward()
        for name, value in other.named_parameters():
            masters[name].grad = value.grad.float()
        peer.step()
        with torch.no_grad():
            for name, value in other.named_parameters():
                value.copy_(masters[name])
    assert_same(
        {name: own["master"] for name, own in states_of(optimizer).items()},
        {k: v.data for k, v in masters.items()},
    )
    assert_same(model.state_dict(), other.state_dict())


def test_bfloat16_weights_are_right_on_average_over_seeds() -> None:
    exact, blocks = made(BF16)
    full = StreamedAdamW(exact, blocks, **SETTINGS, states=FP32)
    stepped(exact, full, 0)
    masters = {name: own["master"] for name, own in states_of(full).items()}
    errors = []
    for seed in range(8):
        model, blocks = made(BF16)
        stepped(model, StreamedAdamW(model, blocks, **SETTINGS, seed=seed), 0)
        found = model.state_dict()
        errors.append(
            torch.cat([((found[name] - value) / spacing(value)).flatten() for name, value in masters.items()])
        )
    whole = torch.stack(errors)
    assert whole.abs().max() <= 1
    assert abs(float(whole.mean())) < 4 * float(whole.std()) / whole.numel() ** 0.5
    # seeds draw independently
    assert float(whole.mean(0).std()) == pytest.approx(float(whole.std()) / 8**0.5, rel=0.1)


def spacing(values: Tensor) -> Tensor:
    """Of the bfloat16s around each value."""
    return torch.exp2(values.abs().clamp(1e-30).log2().floor() - 7)


def test_a_seed_repeats_a_training() -> None:
    runs = []
    for seed in (3, 3, 4):
        model, blocks = made(BF16)
        optimizer = StreamedAdamW(model, blocks, **SETTINGS, seed=seed)
        runs.append(
            (
                [stepped(model, optimizer, step) for step in range(3)],
                {k: v.clone() for k, v in model.state_dict().items()},
            )
        )
    assert_same(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_no_gradient_is_left_and_the_norm_of_all_is_known() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    model(**inputs(0)).loss.backward()
    assert [name for name, value in model.named_parameters() if value.grad is not None] == []
    optimizer.step()
    plain, _ = made()
    plain(**inputs(0)).loss.backward()
    expected = torch.nn.utils.get_total_norm([value.grad for value in plain.parameters()])
    torch.testing.assert_close(optimizer.grad_norm, expected)
    stepped(model, optimizer, 1)
    assert float(optimizer.grad_norm) != pytest.approx(float(expected))


def test_stretches_of_a_tensor_throw_dice_of_their_own() -> None:
    model, blocks = made(vocab_size=1500)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS)
    stretches: dict[Any, list[tuple[int, int]]] = {}

    def noted(
        weight: Tensor,
        grad: Tensor,
        mean: Tensor,
        square: Tensor,
        rule: AdamWStep,
        words: Any,
        first: int,
        copy: Tensor | None,
    ) -> None:
        stretches.setdefault(words, []).append((first, first + len(weight)))

    optimizer.adamw = noted
    stepped(model, optimizer, 0)
    assert sorted(own[-1][1] for own in stretches.values()) == sorted(
        value.numel() for value in model.parameters()
    )
    assert all(
        [first for first, _ in own] == [0, *(end for _, end in own[:-1])] for own in stretches.values()
    )
    assert max(map(len, stretches.values())) > 2


def test_a_learning_rate_set_between_steps_counts() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS | {"weight_decay": 0.0}, states=FP32)
    stepped(model, optimizer, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    stepped(model, optimizer, 1)
    assert_same(model.state_dict(), before)


def test_generation_between_steps_reads_the_new_weights() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    losses = []
    for step in range(2):
        stepped(model, optimizer, step)
        with torch.no_grad():
            losses.append(float(model.eval()(**inputs(5)).loss))
            model.generate(input_ids=inputs(5)["input_ids"][:1], max_new_tokens=3, do_sample=False)
        model.train()
    other, _ = made()
    other.load_state_dict(model.state_dict())
    assert float(other.eval()(**inputs(5)).loss.detach()) == losses[1] != losses[0]


def test_weights_changed_between_two_passes_are_seen() -> None:
    model, blocks = made()
    StreamedAdamW(model, blocks, **SETTINGS)
    with torch.no_grad():
        first = float(model(**inputs(0)).loss)
        for parameter in blocks[-1].parameters():
            parameter.data.mul_(2)
        assert float(model(**inputs(0)).loss) != first


# ------------------------------------------------------------------ what autograd keeps


def test_autograd_keeps_a_leaf_as_itself_so_exchanged_data_is_seen() -> None:
    """What streaming rests on, of torch: .data = counts as no change, and a saved leaf is unpacked as it is
    by then."""
    block, x = OneNode(), torch.ones(1, 4, requires_grad=True)
    y = block(x)
    version = block.weight._version
    block.weight.data = torch.empty(0)
    block.weight.data = torch.eye(4) * 7
    assert block.weight._version == version
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[7.0] * 4]


def test_a_view_that_autograd_keeps_is_not_exchanged_and_such_blocks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    StreamedAdamW(model, [model[1]])
    with torch.no_grad():
        model(torch.ones(2, 4))  # nothing is kept
    with pytest.raises(UsageError, match="one autograd node"):
        model(torch.ones(2, 4, requires_grad=True) * 2)


def test_a_fused_block_that_runs_unfused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks = made()
    StreamedAdamW(model, blocks)
    monkeypatch.setattr(blocks[2], "unready", lambda device: "on purpose")
    with pytest.raises(UsageError, match="block 2"):
        model(**inputs(0))


# ------------------------------------------------------------------ the order of copies


class Job:
    """Copies that nobody has waited for yet, and what has to happen before them."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], before: Sequence[Job | None]) -> None:
        self.pairs, self.before = list(pairs), before

    def run(self) -> None:
        pairs, before, self.pairs, self.before = self.pairs, self.before, [], ()
        for job in before:
            if job is not None:
                job.run()
        for to, source in pairs:
            to.copy_(source)


class Late(HostTraffic):
    """Copies that come as late as they may."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.last: dict[str, Job | None] = {"in": None, "out": None}

    def bring(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        return self._late("in", pairs, after)

    def send(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        return self._late("out", pairs, after)

    def _late(self, way: str, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Job:
        job = self.last[way] = Job(pairs, [self.last[way], *after])
        return job

    def wait(self, event: Event) -> None:
        if event is not None:
            event.run()

    def settle(self) -> None:
        for job in self.last.values():
            self.wait(job)


class Clocks(HostTraffic):
    """Vector clocks of the computation and of both directions (Mattern 1989), and every access to a buffer
    with its time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.clocks = {way: dict.fromkeys(("run", "in", "out"), 0) for way in ("run", "in", "out")}
        self.seen: list[tuple[str, int, int, int, bool]] = []  # way, time, first byte, end, whether it writes
        self.races: list[str] = []

    def access(self, way: str, tensor: Tensor, writes: bool) -> None:
        first = tensor.data_ptr()
        end, mine = first + tensor.nbytes, self.clocks[way]
        for other, time, start, stop, wrote in self.seen:
            if other != way and (writes or wrote) and start < end and first < stop and mine[other] < time:
                self.races.append(f"{way} against {other}")
        self.seen.append((way, mine[way], first, end, writes))

    def tick(self, way: str, after: Sequence[Event] = ()) -> dict[str, int]:
        mine = self.clocks[way]
        for event in after:
            for other, time in (event or {}).items():
                mine[other] = max(mine[other], time)
        mine[way] += 1
        return mine

    def bring(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        return self._timed("in", pairs, after)

    def send(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        return self._timed("out", pairs, after)

    def _timed(self, way: str, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        self.tick(way, after)
        for to, source in pairs:
            self.access(way, to, True)
            self.access(way, source, False)
            to.copy_(source)
        return dict(self.clocks[way])

    def now(self) -> Event:
        return dict(self.tick("run"))

    def wait(self, event: Event) -> None:
        self.tick("run", [event])


def with_traffic(
    traffic: HostTraffic, slots: int = 3, states: torch.dtype = FP32, frozen: bool = False
) -> tuple[Any, StreamedAdamW]:
    """Training with these copies; with a frozen embedding, block 0 is the last to be sent."""
    model, blocks = made(vocab_size=1500)
    model.model.embed_tokens.requires_grad_(not frozen)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=states, slots=slots)
    optimizer.traffic = traffic
    return model, optimizer


@pytest.mark.parametrize("slots", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_copies_that_come_as_late_as_they_may_change_nothing(slots: int) -> None:
    model, optimizer = with_traffic(Late(), slots)
    losses = [stepped(model, optimizer, step) for step in range(3)]
    expected, weights = trained(vocab_size=1500)
    assert losses == expected
    assert_same(model.state_dict(), weights)  # which waits for the last of them
    assert_same(
        {name: own["exp_avg"] for name, own in states_of(optimizer).items()}, moments(vocab_size=1500)
    )


def moments(**changes: Any) -> dict[str, Tensor]:
    """exp_avg after three steps of copies made at once."""
    model, blocks = made(**changes)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    for step in range(3):
        stepped(model, optimizer, step)
    return {name: own["exp_avg"] for name, own in states_of(optimizer).items()}


@pytest.mark.parametrize("reader", ["model", "optimizer"])
def test_what_rests_on_the_host_is_whole_when_it_is_read(reader: str) -> None:
    model, optimizer = with_traffic(Late(), frozen=True)
    stepped(model, optimizer, 0)
    read = {
        "model": model.state_dict,
        "optimizer": lambda: states_of(optimizer)["model.layers.0.mlp.up_proj.weight"],
    }[reader]
    found = {name: value.clone() for name, value in read().items()}
    optimizer.settle()
    assert_same(found, read())


def test_late_copies_show_a_missing_wait() -> None:
    model, optimizer = with_traffic(Late())
    optimizer.traffic.wait = lambda event: None  # type: ignore[method-assign]
    assert stepped(model, optimizer, 0) != trained(1, vocab_size=1500)[0][0]


def races(
    slots: int = 3,
    states: torch.dtype = FP32,
    frozen: bool = False,
    without: Callable[[StreamedAdamW], None] | None = None,
) -> list[str]:
    """What steps, an evaluation and an interrupted pass do in no certain order; `without` takes some of the
    order away."""
    clocks = Clocks()
    model, optimizer = with_traffic(clocks, slots, states, frozen)
    attach, update = optimizer._attach, optimizer.adamw

    def attached(*args: Any) -> None:
        attach(*args)
        assert optimizer.running is not None
        clocks.access("run", optimizer.running.device["weight"], False)

    def updated(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, *rest: Any) -> None:
        for tensor in (weight, mean, square, *(value for value in rest if isinstance(value, Tensor))):
            clocks.access("run", tensor, True)
        update(weight, grad, mean, square, *rest)

    optimizer._attach, optimizer.adamw = attached, updated  # type: ignore[method-assign]
    if without is not None:
        without(optimizer)
    for step in range(3):
        stepped(model, optimizer, step)
        if step == 1:
            with torch.no_grad():
                model(**inputs(step))
            optimizer._attach(optimizer.blocks[2], ("weight",), 1)  # and then an exception
    return clocks.races


@pytest.mark.crossed
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-embedding"])
@pytest.mark.parametrize("states", [FP32, BF16])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_every_two_accesses_to_a_buffer_are_ordered(slots: int, states: torch.dtype, frozen: bool) -> None:
    assert races(slots, states, frozen) == []


def no_wait(optimizer: StreamedAdamW) -> None:
    optimizer.traffic.wait = lambda event: None  # type: ignore[method-assign]


def at_once(way: str) -> Callable[[StreamedAdamW], None]:
    """Copies of one way wait for nothing."""

    def change(optimizer: StreamedAdamW) -> None:
        copy = getattr(optimizer.traffic, way)
        setattr(optimizer.traffic, way, lambda pairs, after: copy(pairs, ()))

    return change


@pytest.mark.parametrize(
    "without", [no_wait, at_once("bring"), at_once("send")], ids=["wait", "bring", "send"]
)
def test_the_clocks_show_what_is_not_ordered(without: Callable[[StreamedAdamW], None]) -> None:
    assert races(without=without)


def test_the_next_block_is_on_its_way_before_this_one_is_waited_for() -> None:
    model, blocks = made(vocab_size=1500)  # the head's states pass through more slots than there are
    optimizer = StreamedAdamW(model, blocks, **SETTINGS)
    said: list[tuple[str, int]] = []
    bring, attach = optimizer._bring, optimizer._attach

    def brought(piece: Any, keys: Any) -> Any:
        if all(slot.piece is not piece for slot in optimizer.slots):
            said.append(("bring", piece.index))
        return bring(piece, keys)

    def attached(piece: Any, *rest: Any) -> None:
        attach(piece, *rest)
        said.append(("run", piece.index))

    optimizer._bring, optimizer._attach = brought, attached  # type: ignore[method-assign]
    model(**inputs(0)).loss.backward()
    forward, backward = (
        said[: said.index(("run", 3)) + 1],
        [entry for entry in said[said.index(("run", 3)) + 1 :] if entry[1] >= 0],
    )
    assert forward == [
        *(("bring", k) for k in (0, 1)),
        ("run", 0),
        ("bring", 2),
        ("run", 1),
        ("bring", 3),
        ("run", 2),
        ("run", 3),
    ]
    assert [entry for entry in backward if entry[0] == "run"] == [("run", k) for k in (3, 2, 1, 0)]
    assert ("bring", 3) not in backward  # the last block of the forward pass is still there
    assert all(backward.index(("bring", k)) < backward.index(("run", k + 1)) for k in (0, 1))


# ------------------------------------------------------------------ what is refused


def test_a_second_backward_pass_is_refused_and_changes_nothing() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    model(**inputs(0)).loss.backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match="second backward"):
        model(**inputs(1)).loss.backward()
    assert_same(model.state_dict(), before)
    optimizer.step()
    expected, _ = trained()
    assert [stepped(model, optimizer, step) for step in (1, 2)] == expected[1:]


def test_two_forward_passes_in_one_backward_are_refused() -> None:
    model, blocks = made()
    StreamedAdamW(model, blocks, **SETTINGS)
    loss = model(**inputs(0)).loss + model(**inputs(1)).loss
    with pytest.raises(UsageError, match="second backward"):
        loss.backward()


def test_a_graph_of_an_earlier_step_is_refused() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS)
    old = model.model(inputs(0)["input_ids"]).last_hidden_state.sum()
    stepped(model, optimizer, 0)
    with pytest.raises(UsageError, match="earlier step"):
        old.backward()


def test_a_step_needs_a_backward_pass() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS)
    with pytest.raises(UsageError, match="without a backward"):
        optimizer.step()
    stepped(model, optimizer, 0)
    with pytest.raises(UsageError, match="without a backward"):
        optimizer.step()


def test_recomputing_a_block_from_outside_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OneNode())
    StreamedAdamW(model, [model[1]])
    y: Any = checkpoint(model[1], model[0](torch.ones(2, 4)), use_reentrant=False)
    with pytest.raises(UsageError, match="checkpointing"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (lambda blocks: None, {"slots": 1}, "two slots"),
        (lambda blocks: None, {"states": torch.float16}, "bfloat16 or float32"),
        (lambda blocks: blocks[1].mlp.down_proj.requires_grad_(False), {}, "frozen"),
        (lambda blocks: blocks[1].mlp.to(BF16), {}, "one dtype"),
        (lambda blocks: setattr(blocks[1].mlp, "up_proj", blocks[2].mlp.up_proj), {}, "share"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    change: Callable[[Any], None], given: dict[str, Any], message: str
) -> None:
    model, blocks = made()
    change(blocks)
    with pytest.raises(UsageError, match=message):
        StreamedAdamW(model, blocks, **given)


def test_a_parameter_shared_with_what_is_outside_is_refused() -> None:
    model, blocks = made()
    model.model.norm.weight = blocks[0].input_layernorm.weight
    with pytest.raises(UsageError, match="share"):
        StreamedAdamW(model, blocks)


# ------------------------------------------------------------------ what breaks in the middle


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(offloaded_adamw, "warn", lines.append)
    yield lines


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("fails", [0, 2])
def test_an_exception_in_the_middle_leaves_a_usable_state(
    name: str, fails: int, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    losses = [stepped(model, optimizer, 0)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own, calls = getattr(fold, name), iter(range(4))

    def failing(*args: Any) -> Any:
        if next(calls) == (fails if name == "forward" else 3 - fails):
            raise RuntimeError("out of memory")
        return own(*args)

    monkeypatch.setattr(fold, name, failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(**inputs(1)).loss.backward()
    monkeypatch.setattr(fold, name, own)
    if name == "forward":
        assert all(value.data_ptr() in resting(optimizer) for block in blocks for value in block.parameters())
        assert_same(model.state_dict(), before)
        assert [*losses, *(stepped(model, optimizer, step) for step in (1, 2))] == trained()[0]
        return
    optimizer.step()
    assert said == [
        f"step 2 leaves {fails + 1} of 4 blocks as they were: its backward pass did not reach them"
    ]
    after = {name: value.clone() for name, value in model.state_dict().items()}
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    kept = tuple(f"model.layers.{k}." for k in range(fails + 1))
    assert same == {name for name in before if name.startswith((*kept, "model.embed_tokens"))}
    stepped(model, optimizer, 2)
    assert said[1:] == []
    assert [name for name, value in model.state_dict().items() if torch.equal(value, after[name])] == []


def resting(optimizer: StreamedAdamW) -> set[int]:
    """Where parameters of blocks lie between passes."""
    return {
        block.host["weight"][entry.span].data_ptr() for block in optimizer.blocks for entry in block.entries
    }


# ------------------------------------------------------------------ states saved and loaded


@pytest.mark.parametrize("states", [FP32, BF16])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_training_goes_on_from_saved_states(states: torch.dtype, model_first: bool) -> None:
    model, blocks = made(BF16)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=states)
    stepped(model, optimizer, 0)
    weights, state = (
        {key: value.clone() for key, value in model.state_dict().items()},
        optimizer.state_dict(),
    )
    kept = copy.deepcopy(state)
    losses = [stepped(model, optimizer, step) for step in (1, 2)]
    other, blocks = made(BF16, seed=5)
    again = StreamedAdamW(other, blocks, **SETTINGS, states=states)
    stepped(other, again, 7)
    if model_first or states is BF16:
        other.load_state_dict(weights)
        again.load_state_dict(kept)
    else:  # masters then are what bfloat16 holds of them
        again.load_state_dict(kept)
        other.load_state_dict(weights)
        masters = {name: own["master"].to(BF16) for name, own in states_of(again).items()}
        assert_same(masters, {name: weights[name] for name in masters})
        return
    assert [stepped(other, again, step) for step in (1, 2)] == losses


def test_states_of_another_model_are_refused_whole() -> None:
    model, blocks = made()
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32)
    stepped(model, optimizer, 0)
    other, others = made(intermediate_size=32)
    state = StreamedAdamW(other, others, **SETTINGS, states=FP32).state_dict()
    before = {name: own["exp_avg"].clone() for name, own in states_of(optimizer).items()}
    with pytest.raises(UsageError, match=r"exp_avg of .*mlp"):
        optimizer.load_state_dict(state)
    assert_same({name: own["exp_avg"] for name, own in states_of(optimizer).items()}, before)
    assert optimizer.steps == 1


def test_weights_put_in_the_place_of_streamed_ones_are_refused() -> None:
    model, blocks = made()
    StreamedAdamW(model, blocks, **SETTINGS)
    with pytest.raises(UsageError, match="assign"):
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        )


# ------------------------------------------------------------------ on a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("slots", [2, 3])
def test_on_a_device_training_is_torchs_and_blocks_rest_on_the_host(slots: int) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 20_000}
    model, blocks = made(device="cuda", **sizes)
    optimizer = StreamedAdamW(model, blocks, **SETTINGS, states=FP32, slots=slots)
    peer, _ = made(device="cuda", **sizes)
    other = torch.optim.AdamW(groups(peer.parameters()), **SETTINGS, foreach=False)
    for step in range(4):
        losses = []
        for one, its in ((model, optimizer), (peer, other)):
            loss = one(**inputs(step, "cuda")).loss
            loss.backward()
            its.step()
            losses.append(loss.detach())
        other.zero_grad()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert {value.device.type for block in blocks for value in block.parameters()} == {"cpu"}
    found = model.state_dict()
    for name, value in peer.state_dict().items():
        close = (found[name].to("cuda") - value).abs() <= 1e-4 + 1e-3 * value.abs()
        assert float(close.float().mean()) > 0.999, name  # where a gradient is almost 0, its sign is the step
