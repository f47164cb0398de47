"""Shard the model of several ranks with torch's FSDP2, and put shards together again.

    shard_model       each rank keeps a range of rows of every weight; a layer is whole only while it computes
    own_part          what this rank has of a tensor; gradients, masters and moments are kept for these rows
    whole             the full tensor on every rank, for publishing and checkpoints: one weight at a time
    shard_like        the opposite: this rank's part of a full tensor, for restoring

A sharded tensor is a DTensor. Plain tensors, as a single rank has them, are their own part and whole, so the rest of
the trainer does not ask how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from transformers.modeling_layers import GradientCheckpointingLayer

from treadle.config.train import ShardOptions
from treadle.train.ranks import Ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_WHOLE_FORWARD = "treadle_whole_forward"  # name of the method that `with_whole_weights` adds to a model


@cache
def _mesh(device_type: str, replicas: int, num_shards: int) -> DeviceMesh:
    """Consecutive ranks share a copy of the model: with one replica per machine, shards stay inside of a machine."""
    if replicas == 1:
        return init_device_mesh(device_type, (num_shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, num_shards), mesh_dim_names=("replica", "shard"))


def shard_model(model: nn.Module, options: ShardOptions, ranks: Ranks, device: torch.device) -> None:
    """Replace the parameters of `model`, in place, by this rank's shards on `device`; nothing if there is one rank.

    Gradients are summed over the ranks while backward runs: each layer's as soon as it is complete, in fp32. A whole
    model may be in host memory: FSDP moves only the shards to the device.
    """
    if ranks.size == 1:
        return
    settings: dict[str, Any] = {
        "mesh": _mesh(device.type, options.replicas, ranks.size // options.replicas),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if options.offload_weights else OffloadPolicy(),
    }
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, reshard_after_forward=options.shard == "fsdp2", **settings)
    fully_shard(model, reshard_after_forward=False, **settings)  # it is needed again at once, by the backward pass
    for module in _sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)  # sums, not means: tokens carry their weight in the whole step
    setattr(model, _WHOLE_FORWARD, MethodType(lambda _, compute, *args: compute(*args), model))
    register_fsdp_forward_method(model, _WHOLE_FORWARD)


def with_whole_weights(
    model: nn.Module, compute: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """`compute(...)` as a forward pass of `model`: weights outside of the layers are whole tensors in it."""
    if not isinstance(model, FSDPModule):
        return compute(*args, **kwargs)
    result: Result = getattr(model, _WHOLE_FORWARD)(lambda: compute(*args, **kwargs))
    if not torch.is_grad_enabled():
        release_whole_weights(model)
    return result


def release_whole_weights(model: nn.Module) -> None:
    """Drop whole weights that a forward pass without backward has left: they would not follow the next update."""
    for module in _sharded_modules(model):
        module.reshard()


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


# ---- tensors


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a sharded tensor, without copying it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; all ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(parameter: Tensor) -> slice:
    """The rows of the full parameter that this rank has; possibly none."""
    if not isinstance(parameter, DTensor):
        return slice(0, parameter.shape[0] if parameter.ndim else 0)
    return rows_of(parameter.shape[0], num_shards(parameter), shard_number(parameter))


def rows_of(num_rows: int, num_shards: int, shard: int) -> slice:
    """The rows of a shard, as FSDP divides them.

    >>> [rows_of(5, 4, shard) for shard in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    size = -(-num_rows // num_shards)
    return slice(min(shard * size, num_rows), min((shard + 1) * size, num_rows))


def num_shards(parameter: Tensor) -> int:
    return parameter.device_mesh.size(parameter.device_mesh.ndim - 1) if isinstance(parameter, DTensor) else 1


def shard_number(parameter: Tensor) -> int:
    """Which of the shards this rank has."""
    return parameter.device_mesh.get_local_rank("shard") if isinstance(parameter, DTensor) else 0


def join_parts(parameter: Tensor, part: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor of which each rank has `part`, divided like `parameter`; `shape`: of the full tensor, if it differs.
    `part` may be on another device than `parameter`."""
    if not isinstance(parameter, DTensor):
        return part
    full = torch.Size(parameter.shape if shape is None else shape)
    stride = torch.empty(full, device="meta").stride()
    mesh = _mesh_on(parameter, part.device)
    return DTensor.from_local(part, mesh, parameter.placements, run_check=False, shape=full, stride=stride)


def shard_like(parameter: Tensor, full: Tensor, device: torch.device) -> Tensor:
    """A copy of `full` on `device`, divided by rows like `parameter` if it has as many of them, else whole."""
    if not isinstance(parameter, DTensor) or full.ndim == 0:
        return full.to(device, copy=True)
    if full.shape[0] == parameter.shape[0]:
        return join_parts(parameter, full[own_rows(parameter)].to(device, copy=True), tuple(full.shape))
    mesh = _mesh_on(parameter, device)
    return DTensor.from_local(full.to(device, copy=True), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _mesh_on(parameter: DTensor, device: torch.device) -> DeviceMesh:
    """The mesh of the same ranks on another kind of device."""
    mesh = parameter.device_mesh
    if mesh.device_type == device.type:
        return mesh
    return _mesh(device.type, mesh.size() // num_shards(parameter), num_shards(parameter))
