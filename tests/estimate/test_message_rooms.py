"""Rooms of messages, foretold for a plan that need not be here."""

from __future__ import annotations

from typing import Any

from petune.estimate.message_rooms import message_rooms
from petune.models import family_of
from petune.parallel.copy_engines import ForetoldEngines
from petune.parallel.tensor.hooks import EXCHANGES
from tests.methods.zoo import tiny
from tests.parallel.plans import BACKENDS


def test_the_block_with_the_widest_heads_says_how_much_room_messages_have() -> None:
    model: Any = tiny("gemma4-causal", num_global_key_value_heads=4)
    family, plan = family_of(model), BACKENDS["sp-gather"]("gemma4-causal", 2)
    cut = plan.cut
    assert family is not None and cut is not None
    tokens, shape, rooms = 1 << 16, family.shape(model.config), list[int]()
    for block in model.model.layers:
        own = EXCHANGES[cut.exchange](None, 0, cut.sequence, engines=ForetoldEngines(2))
        attention = block.self_attn
        queries, keys = (4 * tokens * linear.out_features for linear in (attention.q_proj, attention.k_proj))
        rooms.append(sum(own.room_bytes(queries, keys)))
    found = message_rooms(plan, shape, 4 * tokens * shape.width)
    assert found == max(rooms) > min(rooms)
