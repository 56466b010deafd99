"""What is known of the running call: nested, put back whatever happens, each thread's own."""

from __future__ import annotations

from dataclasses import asdict
from threading import Thread

import pytest
import torch

from petune.rng.context import Running, bound, bound_to, chosen, moved, on_host, running, twins


def test_outside_any_call_nothing_is_known() -> None:
    assert asdict(running()) == asdict(Running())
    assert running().key is None
    assert running().rows is None


def test_an_inner_binding_keeps_what_it_does_not_name() -> None:
    rows = torch.arange(3)
    with bound(rows=rows, key=7, token=4) as outer:
        with bound(token=9, site="decoder.1") as inner:
            assert running() is inner
            assert (inner.key, inner.token, inner.site) == (7, 9, "decoder.1")
            assert inner.rows is rows
        assert running() is outer
        assert (outer.token, outer.site) == (4, "")


def test_binding_to_a_record_forgets_what_was_bound_before() -> None:
    with bound(key=7, token=4), bound_to(Running(feature=2)):
        assert (running().key, running().token, running().feature) == (None, 0, 2)


def test_changes_inside_a_binding_stay_inside() -> None:
    here = Running(key=1)
    for _ in range(2):  # a recomputation starts where the first computation started
        with bound_to(here):
            assert running().drawn == 0
            running().drawn += 3
            running().site = "elsewhere"
    assert (here.drawn, here.site) == (0, "")
    assert running().drawn == 0


def test_a_change_is_seen_by_the_rest_of_the_call() -> None:
    with bound(token=1):
        running().token = 5
        with bound(feature=2):
            assert running().token == 5


def test_what_was_bound_comes_back_after_an_exception() -> None:
    with bound(key=7) as outer:
        with pytest.raises(ZeroDivisionError), bound(key=8), bound_to(Running(key=9)):
            raise ZeroDivisionError
        assert running() is outer
        assert running().key == 7
    assert running().key is None


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(TypeError, match="tokens"), bound(tokens=1):
        pass
    assert running().token == 0


def test_each_thread_has_its_own() -> None:
    seen: list[int | None] = []

    def look() -> None:
        seen.append(running().key)
        with bound(key=8):
            seen.append(running().key)

    with bound(key=7):
        thread = Thread(target=look)
        thread.start()
        thread.join()
        assert running().key == 7
    assert seen == [None, 8]


# ------------------------------------------------------------------ what the host knows


def test_a_tensor_is_found_on_the_host_inside_the_call_that_knows_it() -> None:
    given, host = torch.empty(2, 3, device="meta"), torch.zeros(2, 3)
    pairs = twins({"given": given, "host": host}, {"given": host, "host": host[:1]})
    with bound(host=pairs):
        assert on_host(given) is host
        assert on_host(given[:]) is not host, "another tensor"
        assert on_host(host) is host, "a twin has its shape"
    assert on_host(given) is given


@pytest.mark.parametrize("changed", ["on the device", "on the host"])
def test_a_tensor_that_was_changed_since_is_read_itself(changed: str) -> None:
    given, host = torch.zeros(2, 3), torch.zeros(2, 3)
    with bound(host=twins({"mask": given}, {"mask": host})):
        assert on_host(given) is host
        (given if changed == "on the device" else host)[0, 0] = 1
        assert on_host(given) is given


def test_what_the_device_got_a_copy_of_is_what_the_host_has() -> None:
    batch = {"ids": torch.zeros(2, 3), "there": torch.empty(2, device="meta")}
    there, here = moved(batch, torch.device("meta"))
    assert {name: value.device.type for name, value in there.items()} == {"ids": "meta", "there": "meta"}
    assert here == {"ids": batch["ids"]}
    ((given, host, _),) = twins(there, here)
    assert given is there["ids"] and host is batch["ids"]


def test_on_the_cpu_nothing_is_copied() -> None:
    batch = {"ids": torch.zeros(2, 3)}
    there, here = moved(batch, torch.device("cpu"))
    assert there["ids"] is batch["ids"] and here == {}


@pytest.mark.parametrize("known", [False, True])
def test_entries_are_chosen_by_a_mask_of_the_host_without_asking_the_device(known: bool) -> None:
    values = torch.randn(3, 4, 2, requires_grad=True)
    kept = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    there = torch.empty_like(values, device="meta") if known else values
    found, others = chosen(kept, there, there[..., 0])
    assert found.shape == (5, 2) and found.device == there.device and others.shape == (5,)
    if not known:
        assert torch.equal(found, values[kept]) and torch.equal(others, values[kept][:, 0])
