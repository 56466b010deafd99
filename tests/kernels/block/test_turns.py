"""Passes that go in turns stop where they talk, come back for what messages have left, and one may be
ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from petune.kernels.block.turns import InTurns, Turns, alone, later, then, together

CPU = torch.device("cpu")


def test_two_passes_take_turns_where_they_talk() -> None:
    said: list[str] = []

    def steps(name: str, talks: int) -> InTurns[str]:
        turns = Turns(CPU)
        for at in range(talks):
            said.append(f"{name}{at}")
            yield from turns.talk(lambda at=at: said.append(f"{name}{at} talks"))
        said.append(f"{name} ends")
        return name

    assert together(steps("a", 2), steps("b", 1)) == ["a", "b"]
    assert said == ["a0", "a0 talks", "b0", "b0 talks", "a1", "a1 talks", "b ends", "a ends"]
    assert alone(steps("c", 1)) == "c"


def test_split_turns_end_behind_a_first_product_too_and_one_pass_is_ahead() -> None:
    order: list[str] = []

    def steps(name: str, split: bool) -> InTurns[None]:
        turns = Turns(CPU, split)
        for part in ("attention", "mlp"):
            for product in (1, 2):
                order.append(f"{name} {part} {product}")
                yield from turns.stop()
            yield from turns.talk(lambda part=part: order.append(f"{name} {part} says"))

    together(steps("a", True), steps("b", True), ahead=1)
    assert order == [
        "a attention 1",
        *("a attention 2", "a attention says", "b attention 1"),
        *("a mlp 1", "b attention 2", "b attention says"),
        *("a mlp 2", "a mlp says", "b mlp 1"),
        *("b mlp 2", "b mlp says"),
    ]
    order.clear()
    together(steps("a", False), steps("b", False))
    assert order[:4] == ["a attention 1", "a attention 2", "a attention says", "b attention 1"]


def test_what_a_message_leaves_is_done_when_its_pass_comes_back() -> None:
    order: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: order.append(what)

    def say(name: str) -> None:
        order.append(f"{name} sends terms")
        left = later()
        assert left is not None

        def add() -> Callable[[], None]:
            order.append(f"{name} adds")
            return note(f"{name} sends the sum")

        left.append(add)
        then(note(f"{name} reads"))

    def steps(name: str) -> InTurns[None]:
        yield from Turns(CPU).talk(lambda: say(name))
        order.append(f"{name} goes on")

    together(steps("a"), steps("b"))
    ways = {name: [line[2:] for line in order if line.startswith(name)] for name in "ab"}
    assert ways["a"] == ways["b"] == ["sends terms", "adds", "sends the sum", "reads", "goes on"]
    assert order[:4] == ["a sends terms", "b sends terms", "a adds", "a sends the sum"]
    assert order.index("b adds") < order.index("a reads"), "what is said later gives the other a turn, too"


def test_nothing_is_left_where_nobody_comes_back() -> None:
    done: list[Any] = []
    assert later() is None
    then(lambda: done.append(later()))
    assert done == [None]
