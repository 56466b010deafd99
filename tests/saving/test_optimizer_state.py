"""Optimizer state goes with its parameters' names, comes back bit for bit, and is refused whole where it does
not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from petune.errors import FileError
from petune.files.safetensors import read_json, read_tensors, write_json, write_tensors
from petune.rng.generators import rng_state, set_rng_state
from petune.saving.checkpoint import commit, verify
from petune.saving.optimizer_state import OptimizerPacker, pack_optimizer, restore_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.first(x))))
        return out


def make(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(seed)
    net = Net()
    groups = [
        {"params": [*net.first.parameters()], "weight_decay": 0.1},
        {"params": [net.last.weight], "lr": 0.0123},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1 / 300, betas=(0.87, 0.997), **options)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 7))


def run(net: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(5, 6) * random.random() + float(numpy.random.standard_normal())
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        scheduler.step()


def everything(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.named_parameters()} | {
        key: tensor.clone()
        for key, tensor in pack_optimizer(optimizer, dict(net.named_parameters()))[0].items()
    }


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def save_run(root: Path, step: int, net: Net, optimizer: torch.optim.Optimizer, scheduler: Any) -> Path:
    kept, facts = pack_optimizer(optimizer, dict(net.named_parameters()))
    words, more = rng_state()

    def write(folder: Path) -> None:
        write_tensors(folder / "weights.safetensors", net.state_dict())
        write_tensors(folder / "state.safetensors", kept | words)
        write_json(
            folder / "state.json", {"optimizer": facts, "rng": more, "scheduler": scheduler.last_epoch}
        )

    return commit(root, step, write, run_id="run", facts={})


def resume_run(path: Path, net: Net, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    verify(path)
    net.load_state_dict(read_tensors(path / "weights.safetensors"))
    tensors, facts = read_tensors(path / "state.safetensors"), read_json(path / "state.json")
    restore_optimizer(optimizer, dict(net.named_parameters()), tensors, facts["optimizer"], str(path))
    scheduler.last_epoch = facts["scheduler"]
    set_rng_state(tensors, facts["rng"], str(path))


@pytest.fixture(autouse=True)
def _generators_are_given_back() -> Iterator[None]:
    kept = rng_state()
    yield
    set_rng_state(*kept, "test")


def seed_all() -> None:
    random.seed(5)
    numpy.random.seed(6)
    torch.manual_seed(7)
    random.gauss(0, 1)  # leaves its second value in the state
    numpy.random.standard_normal()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}])
def test_resuming_at_any_step_equals_going_straight_on(tmp_path: Path, options: dict[str, Any]) -> None:
    straight = make(**options)
    seed_all()
    run(*straight, 20)
    wanted = everything(*straight[:2])
    for cut in (0, 1, 10, 19):
        parts = make(**options)
        seed_all()
        run(*parts, cut)
        path = save_run(tmp_path, cut, *parts)
        again = make(seed=99, **options)
        seed_all()
        run(*again, 3)  # whatever it did before must not matter
        resume_run(path, *again)
        run(*again, 20 - cut)
        assert equal(everything(*again[:2]), wanted), f"cut at {cut}"


def test_an_optimizer_comes_back_bit_identical_with_its_options(tmp_path: Path) -> None:
    net, optimizer, scheduler = make()
    run(net, optimizer, scheduler, 4)
    tensors, facts = pack_optimizer(optimizer, dict(net.named_parameters()))
    assert {key.split("/")[1] for key in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    assert "optimizer/exp_avg/first.weight" in tensors
    fresh_net, fresh, _ = make(seed=3)
    given = {key: tensor.clone() for key, tensor in tensors.items()}
    restore_optimizer(fresh, dict(fresh_net.named_parameters()), given, json.loads(json.dumps(facts)), "here")
    old, new = optimizer.state_dict(), fresh.state_dict()
    assert old["param_groups"] == new["param_groups"] and isinstance(new["param_groups"][0]["betas"], tuple)
    for index, state in old["state"].items():
        assert equal(state, new["state"][index])
    kept = {
        key: tensor.clone()
        for key, tensor in pack_optimizer(fresh, dict(fresh_net.named_parameters()))[0].items()
    }
    run(net, optimizer, scheduler, 1)
    assert equal(pack_optimizer(fresh, dict(fresh_net.named_parameters()))[0], kept), "it is not its own"


def test_a_packer_gives_what_packing_anew_gives_whatever_has_changed() -> None:
    net, optimizer, scheduler = make()
    names_of, packer = dict(net.named_parameters()), OptimizerPacker()

    def step() -> None:
        run(net, optimizer, scheduler, 1)

    def come_back() -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    def forget() -> None:
        optimizer.state.pop(net.last.weight)

    def add() -> None:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)

    before: dict[str, Any] | None = None
    for change in (lambda: None, step, step, come_back, step, forget, step, add, step):
        change()
        (tensors, facts), (expected, told) = packer(optimizer, names_of), pack_optimizer(optimizer, names_of)
        assert facts == told and tensors.keys() == expected.keys()
        assert all(value is expected[name] for name, value in tensors.items())
        assert facts is not before, "a snapshot that is still to be written must not change"
        before = facts


def test_state_follows_names_and_not_positions() -> None:
    net, optimizer, scheduler = make()
    run(net, optimizer, scheduler, 3)
    tensors, facts = pack_optimizer(optimizer, dict(net.named_parameters()))
    other = Net()
    swapped = torch.optim.AdamW(
        [
            {"params": [*reversed([*other.first.parameters()])], "weight_decay": 0.1},
            {"params": [other.last.weight]},
        ],
        lr=1.0,
    )
    restore_optimizer(swapped, dict(other.named_parameters()), tensors, facts, "here")
    assert torch.equal(swapped.state[other.first.bias]["exp_avg"], tensors["optimizer/exp_avg/first.bias"])
    assert torch.equal(
        swapped.state[other.last.weight]["exp_avg_sq"], tensors["optimizer/exp_avg_sq/last.weight"]
    )


def test_a_rate_that_is_a_tensor_and_a_rate_that_never_stepped_are_kept() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01), foreach=False)
    tensors, facts = pack_optimizer(optimizer, dict(net.named_parameters()))
    fresh = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5), foreach=False)
    restore_optimizer(fresh, dict(net.named_parameters()), tensors, facts, "here")
    assert torch.equal(fresh.param_groups[0]["lr"], torch.tensor(0.01)) and not fresh.state


def test_state_that_does_not_fit_is_refused_whole() -> None:
    net, optimizer, scheduler = make()
    run(net, optimizer, scheduler, 2)
    names_of = dict(net.named_parameters())
    tensors, facts = pack_optimizer(optimizer, names_of)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    key = "optimizer/exp_avg/first.weight"
    wide = nn.ModuleDict({"first": nn.Linear(6, 9), "last": nn.Linear(8, 1, bias=False)})
    wide_groups = [{"params": [*wide["first"].parameters()]}, {"params": [*wide["last"].parameters()]}]
    run(net, optimizer, scheduler, 2)
    before = everything(net, optimizer)

    def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        copy: dict[str, Any] = json.loads(json.dumps(facts))
        change(copy)
        return copy

    cases: list[tuple[str, torch.optim.Optimizer, dict[str, Any], dict[str, Tensor], dict[str, Any]]] = [
        ("missing", optimizer, names_of, {k: v for k, v in tensors.items() if k != key}, facts),
        ("unexpected", optimizer, names_of, tensors | {"optimizer/exp_avg/nowhere": torch.ones(1)}, facts),
        ("shape", optimizer, names_of, tensors | {key: torch.ones(3)}, facts),
        ("holds int64, not moments", optimizer, names_of, tensors | {key: tensors[key].long()}, facts),
        ("shape", torch.optim.AdamW(wide_groups), dict(wide.named_parameters()), tensors, facts),
        (
            "first.wait",
            optimizer,
            {name.replace("weight", "wait"): value for name, value in names_of.items()},
            tensors,
            facts,
        ),
        ("groups differ", torch.optim.AdamW(net.parameters()), names_of, tensors, facts),
        ("another optimizer", torch.optim.SGD(net.parameters()), names_of, tensors, facts),
        ("not what", optimizer, names_of, tensors, {}),
        ("not what", optimizer, names_of, tensors, changed(lambda copy: copy.update(state=3))),
        ("not what", optimizer, names_of, tensors, changed(lambda copy: copy["groups"][0].pop("params"))),
        ("not what", optimizer, names_of, tensors, changed(lambda copy: copy["groups"][0].pop("options"))),
        (
            "not what",
            optimizer,
            names_of,
            tensors,
            changed(lambda copy: copy["state"]["first.bias"].pop("values")),
        ),
    ]
    for match, into, named, given, said in cases:
        with pytest.raises(FileError, match=match):
            restore_optimizer(into, named, given, said, "step-2")
    assert equal(everything(net, optimizer), before)


def test_a_parameter_without_a_name_is_our_mistake() -> None:
    net, optimizer, _ = make()
    with pytest.raises(ValueError, match="no name"):
        pack_optimizer(optimizer, {"first.weight": net.first.weight})
