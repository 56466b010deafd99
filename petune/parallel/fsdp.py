"""Parameters, gradients and optimizer sharded over the dp axis: torch's FSDP2 (Zhao et al. 2023,
arXiv:2304.11277), block by block.

Every block of every stack is a unit that is gathered for its own forward and backward and freed again; all
the rest (embeddings, norms, heads, ladders, which methods other than forward call) is the root's and stays
gathered while the model runs. Tensors are cut along dim 0 by torch's chunk rule: [7, 5] over two ranks is [4,
5] and [3, 5]. Cut by other axes first: FSDP shards the plain slices that are left.

**Gradients are sums over dp.** The loss is divided by the count of the whole step already, so nothing is
averaged: the divisor is 1 and the only reduction SUM, which gloo and NCCL both have.

**What stays whole** on every replica, and is summed by whoever sums unsharded gradients: scalars, which FSDP
cannot cut; with `frozen` False, what does not train; in a unit that trains two dtypes, those tensors that are
of the rarer one, as a unit reduces in one dtype; on a pipeline's stages, what lies outside the blocks, as
gradients arrive there without passing the model's output, where the root waits for them; and where a method
is light (`is_light`) all that trains and all that is small, so that a step sends no weights but large frozen
ones. No mixed-precision policy is set: tensors are gathered in the dtype they have, so numbers are those of
one process.

With replicas > 1 (HSDP) dp rank d holds shard d % (dp / replicas) of group d // (dp / replicas), and
`replicas` ranks hold the same shard.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from petune.errors import PetuneError
from petune.models.frozen_weight import quantised_in
from petune.models.sharded import Shards, put_shards
from petune.models.stack import Stack
from petune.parallel.collectives import gather_dims
from petune.parallel.in_place import LARGE, gather_in_place, in_turn, same
from petune.parallel.launch.process_group import limit
from petune.parallel.mesh import Mesh
from petune.parallel.plan import ParallelPlan, Sharding
from petune.parallel.sharded_weight import ShardedWeight

# ---------------------------------------------------------------- sharding


def shard(
    model: nn.Module, plan: ParallelPlan, mesh: Mesh, tuned: Iterable[nn.Parameter], light: bool = False
) -> None:
    """Shard `model` over the dp axis as `plan.sharding` says, in place. Names, ties and what trains stay as
    they are.

    `tuned`: the parameters that train. light: whether these, and what is small, stay whole; what `is_light`
    says of the whole model, as ranks with unequal parts of it must do the same. `model` may still be on the
    CPU: it moves to the mesh's device unit by unit, so that the device never holds it whole, and comes to
    rest where the plan says. What is on the meta device stays there, to be `allocated`. Every parameter
    object that is sharded is replaced by a DTensor, so parameters must be collected again afterwards. The
    model must be entered by calling it; it can no longer be copied. Raises PetuneError if what trains is not
    what was announced.
    """
    sharding = plan.sharding
    # T5's position bias; nobody writes into it
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    assert sharding is not None
    wanted = {id(parameter) for parameter in tuned}
    trains = {name: id(value) in wanted for name, value in model.named_parameters(remove_duplicate=False)}
    _check_mask(model, trains)
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    blocks = [block for stack in stacks for block in stack.blocks]
    if sharding.frozen:
        _let_cut(blocks)
    left = _left_whole(model, blocks, plan, sharding)
    if light:
        left |= set(filter(whole_where_light, model.parameters()))
    _move(model, left, mesh.device)
    settings: dict[str, Any] = {
        "mesh": _devices(plan, sharding, mesh),
        # pinned memory is for copies to a CUDA device, and does not exist without one
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        if sharding.offload
        else OffloadPolicy(),
        "ignored_params": left,
    }
    for block in blocks:
        if any(value not in left for value in block.parameters()):
            _unit(block, reshard_after_forward=sharding.reshard, **settings)
    _unit(model, reshard_after_forward=False, **settings)
    for value in model.parameters():
        # FSDP's own object: `local` gives another one over the same memory
        if isinstance(value, DTensor) and isinstance(own := value._local_tensor, ShardedWeight):
            own.begin_at(first_row(value))
    for stack in stacks:
        in_turn(stack.blocks)
    if not any(value.is_meta for value in model.parameters()):
        settle(model, sharding, mesh.device)
    put_shards(model, _held(model, blocks, sharding))
    if hasattr(model, "generate"):  # it calls an encoder by itself, which needs what is the root's
        register_fsdp_forward_method(model, "generate")
    _check_mask(model, trains)


def weighed(model: nn.Module) -> tuple[int, int]:
    """Bytes of `model`, which is whole: of what trains, and of large frozen tensors."""
    every = list(model.parameters())
    trained = sum(value.nbytes for value in every if value.requires_grad)
    return trained, sum(value.nbytes for value in every if not value.requires_grad and value.nbytes >= LARGE)


def is_light(bytes_of: tuple[int, int], plan: ParallelPlan) -> bool:
    """Whether what trains takes no more with its gradients and states than a rank's shard of the large frozen
    tensors, as `plan` shards them. bytes_of: what a model is `weighed`."""
    (trained, large), sharding = bytes_of, plan.sharding
    if sharding is None or not sharding.frozen or sharding.offload:
        return False
    return 4 * trained <= large * sharding.replicas // plan.dp and large > 0


def whole_where_light(value: Tensor) -> bool:
    """Whether every rank has all of a tensor where a method is light."""
    return value.requires_grad or value.nbytes < LARGE


def _held(model: nn.Module, blocks: Sequence[nn.Module], sharding: Sharding) -> Shards:
    """What this rank's device holds of a model that has been sharded."""
    every = (*model.parameters(), *model.buffers())
    here = [value for value in every if not (sharding.offload and is_sharded(value))]
    cut = [list(filter(is_sharded, block.parameters())) for block in blocks]
    inside = {id(value) for block in cut for value in block}
    rest = [value for value in every if is_sharded(value) and id(value) not in inside]
    return Shards(
        own=sum(local(value).nbytes for value in here),
        trained=sum(local(value).numel() for value in here if value.requires_grad),
        gathered=gathered(cut, rest, sharding),
    )


def gathered(blocks: Iterable[Sequence[Tensor]], rest: Sequence[Tensor], sharding: Sharding) -> int:
    """Bytes that are whole at once while a model runs, of the sharded tensors of its blocks and of the rest.

    With their gradients: the rest, and two blocks, one that runs and one that is gathered or reduced
    meanwhile; with `reshard` off the weights of all blocks.
    """
    weights, gradients = [], []
    for block in blocks:
        weights.append(_whole_bytes(block))
        gradients.append(_whole_bytes(value for value in block if value.requires_grad))
    inside = sum(sorted(weights)[-2:] if sharding.reshard else weights) + sum(sorted(gradients)[-2:])
    return inside + _whole_bytes(rest) + _whole_bytes(value for value in rest if value.requires_grad)


def _whole_bytes(values: Iterable[Tensor]) -> int:
    """Of tensors of which this rank may hold shards."""
    pairs = [(value, local(value)) for value in values]
    return sum(own.whole if isinstance(own, ShardedWeight) else value.nbytes for value, own in pairs)


class Settle:
    """Hook after a unit: where no gradient will flow back, no backward pass frees what the unit has gathered.

    Otherwise the next pass would find it gathered still, and not see what was written into shards meanwhile;
    and replicas would fall out of step where something frees it on one of them alone.
    """

    def __call__(self, unit: nn.Module, args: Any, output: Any) -> None:
        """Free the gathered tensors unless a backward pass is to come."""
        if not _flows_back(output):
            cast("FSDPModule", unit).reshard()


def _flows_back(output: Any) -> bool:
    """Whether a tensor of a module's output, a tuple or a ModelOutput of them, has a gradient."""
    if isinstance(output, Tensor):
        return output.requires_grad
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    )
    return any(map(_flows_back, parts))


def _check_mask(model: nn.Module, trains: dict[str, bool]) -> None:
    """Raise PetuneError unless exactly what should train is marked so, under its names."""
    found = {name: value.requires_grad for name, value in model.named_parameters(remove_duplicate=False)}
    if found != trains:
        wrong = [name for name in {**trains, **found} if trains.get(name) != found.get(name)]
        what = "sharding and the model disagree on what trains; this is a fault of petune"
        raise PetuneError(what, where=", ".join(wrong[:3]))


def _let_cut(blocks: Iterable[nn.Module]) -> None:
    """Let FSDP cut the quantised weights of blocks as what they are held in; a shared one stays shared."""
    made: dict[int, nn.Parameter] = {}
    for block in blocks:
        for owner, name, value in list(quantised_in(block)):
            whole = ShardedWeight(value.form, len(value))
            own = made.setdefault(id(value), nn.Parameter(whole, requires_grad=False))
            owner._parameters[name] = own


def _left_whole(
    model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, sharding: Sharding
) -> set[nn.Parameter]:
    """The parameters that FSDP must not touch."""
    inside = {value for block in blocks for value in block.parameters()}
    rest = [value for value in model.parameters() if value not in inside]
    left: set[nn.Parameter] = set(rest) if plan.pp > 1 else set()
    for unit in [*(list(block.parameters()) for block in blocks), rest]:
        left |= {value for value in unit if value.dim() == 0 or not (value.requires_grad or sharding.frozen)}
        counts: Counter[torch.dtype] = Counter()
        for value in unit:
            if value.requires_grad and value not in left:
                counts[value.dtype] += value.numel()
        if len(counts) > 1:
            most = counts.most_common(1)[0][0]
            left |= {value for value in unit if value.requires_grad and value.dtype != most}
    return left


def _move(model: nn.Module, left: set[nn.Parameter], device: torch.device) -> None:
    """Bring to the device what FSDP does not: it moves its own parameters, a unit at a time."""
    for tensor in (*left, *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _devices(plan: ParallelPlan, sharding: Sharding, mesh: Mesh) -> DeviceMesh:
    """The dp axis of this rank, [dp] or for HSDP [replicas, shards]. For the latter all ranks of the world
    must call this together."""
    assert mesh.devices is not None
    if sharding.replicas == 1:
        return mesh.devices["dp"]
    sizes = (plan.pp, sharding.replicas, plan.dp // sharding.replicas, plan.tp)
    whole = init_device_mesh(mesh.device.type, sizes, mesh_dim_names=("pp", "replicas", "shards", "tp"))
    limit(whole.get_all_groups())
    return whole["replicas", "shards"]


def _unit(module: nn.Module, **settings: Any) -> None:
    """Make `module` a unit that reduces gradients by plain sums."""
    unit = fully_shard(module, **settings)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # else by PREMUL_SUM or AVG, which gloo does not have
    module.register_forward_hook(Settle())


# ---------------------------------------------------------------- shards and wholes


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a shard only. The gradient of a tuned tensor that is not sharded is still to be
    summed over dp."""
    return isinstance(tensor, DTensor)


def copies(tensor: Tensor, plan: ParallelPlan) -> int:
    """How many ranks of the dp axis hold the elements of `tensor` that this one holds: what a norm over all
    ranks divides by."""
    if not is_sharded(tensor):
        return plan.dp
    return plan.sharding.replicas if plan.sharding is not None else 1


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient, as a plain tensor over the same memory; possibly with
    zero rows."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()
    return held


@torch.no_grad()
def wholes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The wholes of what is sharded over dp, detached and plain, on the mesh's device; a tensor that is not
    sharded comes back as it is.

    Every rank of the axis must call it. A shard that rests on the CPU travels by way of the device. All of
    them are there at once.
    """
    found = list(tensors)
    sharded = {at: tensor for at, tensor in enumerate(tensors) if isinstance(tensor, DTensor)}
    if not sharded:
        return found
    mesh = next(iter(sharded.values())).device_mesh  # those of all units have the same ranks
    axis = mesh.ndim - 1  # shards; before it replicas, which hold the same
    parts = [tensor.to_local().to(mesh.device_type) for tensor in sharded.values()]
    cuts = [(chunks(tensor.shape[0], mesh.size(axis)), 0) for tensor in sharded.values()]
    for at, whole in zip(sharded, gather_dims(parts, cuts, mesh.get_group(axis)), strict=True):
        found[at] = whole
    return found


def allocated(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter on `device`, without values, like one on the meta device, a shard like a shard."""
    made = torch.empty_like(local(parameter), device=device)
    if isinstance(parameter, DTensor):
        made = _sharded_as(parameter, made)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def settle(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Let the units of `model` know the parameters that were put in the place of theirs. Shards of unequal
    size change their memory here, so nobody may hold it yet. From then on what is large is gathered in
    place."""
    model._apply(same)
    gather_in_place(model, _units(model, sharding.reshard), device)


def _units(model: nn.Module, reshard: bool) -> Iterator[tuple[FSDPModule, list[nn.Parameter], bool]]:
    """FSDP's units, the blocks and then the rest: their parameters, and whether they are freed after a
    forward pass."""
    seen: set[nn.Parameter] = set()
    for unit in reversed([module for module in model.modules() if isinstance(module, FSDPModule)]):
        assert isinstance(unit, nn.Module)
        own = [value for value in unit.parameters() if is_sharded(value) and value not in seen]
        seen.update(own)
        yield unit, own, reshard and unit is not model


def first_row(parameter: Tensor) -> int:
    """The number of the first of the rows that this rank holds of a parameter."""
    first = 0
    if isinstance(parameter, DTensor):
        length, mesh = parameter.shape[0], parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                sizes, index = chunks(length, mesh.size(axis)), mesh.get_local_rank(axis)
                first, length = first + sum(sizes[:index]), sizes[index]
    return first


def _sharded_as(parameter: DTensor, part: Tensor) -> DTensor:
    """This rank's part of a tensor that is sharded as `parameter` is."""
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def chunks(length: int, count: int) -> tuple[int, ...]:
    """How torch's chunk rule cuts `length` rows in `count`: equal parts, then what is left, then nothing."""
    size = -(-length // count)
    return tuple(max(0, min(size, length - size * number)) for number in range(count))
