"""The sizes of a transformer block, which its seconds (petune.kernels.memory.block_cost) and its bytes
(petune.kernels.memory.buffers) are made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from petune.kernels.block.packed_linear import FOLDED, SUMMED
from petune.models.joined import MEMBERS
from petune.models.spec import Attention, Role, SubLayer
from petune.models.tuned_parts import TENSORS


@dataclass(frozen=True)
class Ranks:
    """The rank of the low-rank update of each role, 0 where there is none."""

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    gate: int = 0
    up: int = 0
    down: int = 0

    @property
    def qkv(self) -> int:
        """Of q, k and v, whose low-rank inputs are one product."""
        return self.q + self.k + self.v

    @property
    def gu(self) -> int:
        """Of gate and up, likewise."""
        return self.gate + self.up


# The role under which the rank of a packed projection's one update is counted
FIRST: dict[Role, Role] = {"qkv": "q", "gate_up": "gate"}
GroupKind = Literal["in", "out", "up", "down"]


@dataclass(frozen=True)
class GroupPlace:
    """One group of linears: what it does, its roles, its paths, one where these are one linear, and the place
    of its first tensor among the block's, `TENSORS` for each role. scaled: results are multiplied by what
    trains, before they are rounded; unscaled_by_reader: the way back through that is the reader's;
    scaled_by_reader: both are, the activation's; enters: inputs are multiplied."""

    kind: GroupKind
    roles: tuple[Role, ...]
    paths: tuple[str, ...]
    first: int
    scaled: bool = False
    unscaled_by_reader: bool = False
    scaled_by_reader: bool = False
    enters: bool = False

    @property
    def sites(self) -> tuple[Role, ...]:
        """The roles of its linears, of which one may have several parts."""
        if len(self.paths) == len(self.roles):
            return self.roles
        return tuple(role for role, parts in MEMBERS.items() if parts == self.roles)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The places of its tensors."""
        return tuple(range(self.first, self.first + TENSORS * len(self.roles)))


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a mixture: how many experts there are and how many a token goes through, columns of one,
    ranks of the updates of gate | up and of down. shared: beside them stands one that every token goes
    through, of the block's own columns. made: bytes a number in which their weights are held that are made
    dense for each product, 0 where they are dense."""

    number: int
    chosen: int
    columns: int
    up: int = 0
    down: int = 0
    shared: bool = False
    made: float = 0.0

    def weights(self, width: int) -> int:
        """Numbers of all weights, the router's and the shared expert's gate among them."""
        return (3 * self.columns * self.number + self.number + self.shared) * width

    def factors(self, width: int) -> int:
        """Numbers of the factors of the updates."""
        up, down = self.up * (width + 2 * self.columns), self.down * (self.columns + width)
        return self.number * (up + down)


@dataclass(frozen=True)
class CoreShape:
    """The sizes of a core that a block calls as it is: numbers of its weights, and of what tunes them. Of a
    token: bytes that its graph keeps, and bytes alive within its backward pass; FLOP beside its products.
    scores: of attention, its heads, those of keys, and their width. beside: bytes alive within its forward
    pass; moved: read and written there besides."""

    weights: int
    tuned: int
    kept: float
    within: float
    flop: float
    scores: tuple[int, int, int] | None = None
    beside: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a transformer block. columns: of the MLP; trained: its weights train too; itemsize: bytes
    of an activation and of a weight; fp8: frozen weights multiply in eight bits; made: bytes a number in
    which they are held that are made dense for each product, 0 where they are dense. drops: the inputs of its
    updates drop out; dropouts: so do its own values. share: the part of all tokens that a rank has between
    sub-layers that are cut and connected by sequence. weight: bytes of a weight that autocast may round anew
    in every pass, 0 where it may not. memory: of the tokens of an encoder, how many there are for each own
    one, and how many the longest text has; None: as of own ones. experts: of its mixture, None without one;
    gated and columns are then the shared expert's. roomless: behind its weights, which are transposed, is no
    room for factors. called: its core that is called as it is, None where steps compute all; heads are 0 then
    where it makes all of what it gives."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    gated: bool = True
    ranks: Ranks = field(default_factory=Ranks)
    trained: bool = False
    itemsize: int = 2
    fp8: bool = False
    made: float = 0.0
    drops: bool = False
    dropouts: bool = False
    share: float = 1.0
    weight: int = 0
    memory: tuple[float, int] | None = None
    experts: ExpertSizes | None = None
    roomless: bool = False
    called: CoreShape | None = None
    sublayers: tuple[SubLayer, ...] = field(kw_only=True)

    def linears(self, place: GroupPlace) -> tuple[int, int, int]:
        """(inputs, outputs, rank) of a group."""
        queries, keys, above = self.queries, self.kv_heads * self.head_dim, self.columns
        outputs = {"q": queries, "k": keys, "v": keys, "qkv": self.qkv, "o": self.width}
        outputs |= {"gate": above, "up": above, "gate_up": self.gu, "down": self.width}
        inputs = {"in": self.width, "out": self.queries, "up": self.width, "down": above}[place.kind]
        made = sum(outputs[role] for role in place.roles)
        return inputs, made, sum(self.rank(role) for role in place.roles)

    def rank(self, role: Role) -> int:
        """Of the update of a role."""
        found: int = getattr(self.ranks, FIRST.get(role, role))
        return found

    def updates(self, place: GroupPlace) -> int:
        """The roles of a group that have an update."""
        return sum(self.rank(role) > 0 for role in place.roles)

    def room(self, place: GroupPlace) -> int:
        """Columns behind a group's input for its low-rank one, so that one product sums both."""
        none = self.fp8 or self.roomless or place.scaled or place.kind == "out"
        return 0 if none or (place.kind == "up" and self.defers) else self.linears(place)[2]

    def own(self, tokens: int) -> int:
        """Of so many tokens those that a rank has, where all of the block computes on one rank's tokens."""
        cores = [sublayer.core for sublayer in self.sublayers if isinstance(sublayer.core, Attention)]
        exchange = next((core.exchange for core in cores if core.exchange is not None), None)
        cut = any(sublayer.connection is not None for sublayer in self.sublayers)
        return tokens if exchange is None or cut else exchange.own(tokens)

    @property
    def queries(self) -> int:
        """Columns of q, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Columns of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gu(self) -> int:
        """Columns of gate and up together, or of up alone."""
        return self.columns * (1 + self.gated)

    @property
    def across(self) -> float:
        """An encoder's tokens for each own one."""
        return 1.0 if self.memory is None else self.memory[0]

    @property
    def weight_bytes(self) -> int:
        """Of a dense weight."""
        return self.weight or self.itemsize

    @property
    def attentions(self) -> int:
        """How many of its sub-layers attend, so that their linears are of these sizes: two of a decoder's."""
        return max(1, sum(isinstance(one.core, Attention) for one in self.sublayers))

    @property
    def parameters(self) -> int:
        """Weights of the block's matrices."""
        kinds = [one.core for one in self.sublayers if isinstance(one.core, Attention)]
        keyed = any(core.v_norm and "v" not in core.region.sites for core in kinds)
        qkv = self.qkv - keyed * self.kv_heads * self.head_dim
        borrows = any(core.lending is not None and core.lending.borrows for core in kinds)
        qkv = self.queries if borrows else qkv
        qkv = 0 if self.called is not None else qkv  # which are the core's
        own = self.width * (self.attentions * (qkv + self.queries) + self.gu + self.columns)
        own += 2 * self.width * self.of_tokens
        own += 0 if self.called is None else self.called.weights
        return own + (0 if self.experts is None else self.experts.weights(self.width))

    @property
    def of_tokens(self) -> int:
        """Features of the vector that it is handed for every token, 0 for none."""
        return sum(one.per_token.features for one in self.sublayers if one.per_token is not None)

    @property
    def routed(self) -> ExpertSizes:
        """Its experts, where it has some."""
        assert self.experts is not None
        return self.experts

    @property
    def called_core(self) -> CoreShape:
        """Its core that is called as it is, where it has one."""
        assert self.called is not None
        return self.called

    @property
    def expert_factors(self) -> int:
        """Numbers of the factors of the updates of its experts."""
        return 0 if self.experts is None else self.experts.factors(self.width)

    @property
    def bottlenecks(self) -> int:
        """Numbers of its bottlenecks."""
        features = [sublayer.bottleneck for sublayer in self.sublayers if sublayer.bottleneck]
        return sum(2 * self.width * own + self.width + own for own in features)

    @property
    def adapters(self) -> int:
        """Numbers of the low-rank factors and of bottlenecks."""
        ranks, mlp, keys = self.ranks, self.width + self.columns, self.kv_heads * self.head_dim
        from_width = ranks.q * (self.width + self.queries) + (ranks.k + ranks.v) * (self.width + keys)
        own = self.attentions * (from_width + ranks.o * (self.queries + self.width))
        own += (ranks.gu + ranks.down) * mlp + self.bottlenecks + self.expert_factors
        return own + (0 if self.called is None else self.called.tuned)

    @property
    def defers(self) -> bool:
        """Whether the activation adds the update of gate | up, as petune.kernels.block.packed_linear says."""
        scaled = not self.gated and any("up" in one.scaled for one in self.sublayers)
        alike = not self.gated or self.ranks.gate == self.ranks.up
        return not scaled and 0 < self.ranks.gu <= FOLDED and alike

    @property
    def makes_m_again(self) -> bool:
        """Whether the activation is computed again, as the down projection's gradients need its input."""
        return self.trained or self.ranks.down > FOLDED

    @property
    def writes_m(self) -> bool:
        """Whether that input lies in memory in the backward pass; otherwise it lives within one kernel."""
        return self.trained or self.ranks.down > SUMMED
