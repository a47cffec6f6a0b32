"""A partitioner for AOTAutograd: plans a joint graph and has PyTorch split it accordingly.

The plan is written as recompute tags on the nodes of the forward pass, all in one region, for PyTorch's own partitioner, which
knows how to extract the two graphs, to replay random numbers and to put what is recomputed just before its first reader. Where
values are rebuilt more than once, which tags can't say, the re-runs are written into the graph (see ``_clone``).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import fx

from torch_echo import compat, nested
from torch_echo.compile._capture import Capture, capture
from torch_echo.compile._clone import clone
from torch_echo.compile._fusion import FusedCost
from torch_echo.compile._share import Shared
from torch_echo.cost import AnalyticCost, CostCache, Workspaces, device_key, get_cost_model
from torch_echo.errors import BudgetInfeasible, CaptureError, TorchEchoError
from torch_echo.footprint import Replayer
from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.planning import Plan, footprint_of, front, plan
from torch_echo.report.explanation import Explanation

__all__ = ["Partitioner", "left", "plans", "tag"]

plans: list[Explanation] = []
"""Of the graphs that were compiled in this process, in order."""


left: list[str] = []
"""Why graphs were left to PyTorch's own partition, in order."""


class Partitioner:
    """Called by AOTAutograd with each joint graph. `options` as for the tape. `fused`: the parts are for Inductor. `shared`: the
    other graphs of a step, if they are planned together."""

    def __init__(self, options: Options, fused: bool = False, shared: Shared | None = None) -> None:
        self.options = options
        self.fused = fused
        self.shared = shared

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        try:
            _read_inputs(joint)
            joint.graph.eliminate_dead_code()
            device = _device_of(joint)
            cache = CostCache(device_key(device))
            cost = get_cost_model(self.options.cost, device, cache)
            if self.fused:
                cost = FusedCost(cost, AnalyticCost(cache, device))
            found = capture(joint, kwargs["num_fwd_outputs"], cost, Workspaces(cache))
            cost.save()  # the cache, with the workspaces in it
            made, replayer = self._plan(found, device, _gradients(joint, **kwargs))
        except BudgetInfeasible:
            raise
        except TorchEchoError as error:
            if self.options.strict:
                raise
            left.append(str(error))
            warnings.warn(f"torch-echo leaves a graph to PyTorch's own partition: {error}", stacklevel=2)
            return compat.partition(joint, inputs, tagged=False, **kwargs)
        if made.groups:
            clone(joint, found, made.dropped, made.groups, nested.schedule(replayer, made.dropped, made.groups))
        else:
            tag(found, made.dropped, made.rerun)
        return compat.partition(joint, inputs, tagged=True, **kwargs)

    def _plan(self, found: Capture, device: torch.device, gradients: tuple[int, int]) -> tuple[Plan, Replayer]:
        """`gradients`: bytes of those of parameters and of other inputs. A region is planned by itself, and knows no budget: what
        is left of it when others are planned is not known yet."""
        graph, options = found.graph, self.options
        graph.base_bytes = max(0, live_bytes(device) - graph.older_bytes)
        replayer = Replayer(graph)
        points, chosen, on_infeasible = None, None, options.on_infeasible
        shared = None if found.region else self.shared
        if shared is not None:
            points = front(graph, replayer=replayer, nested=True)
            chosen = shared.meet(graph, points, gradients)
            on_infeasible = "least" if shared.among_others else on_infeasible
        made = plan(
            graph,
            budget=None if found.region else options.budget_bytes(device),
            max_overhead=options.max_overhead,
            policy=options.policy,
            on_infeasible=on_infeasible,
            front=points,
            chosen=chosen,
            nested=True,
        )
        if shared is not None:
            shared.took(made)
        plans.append(Explanation(graph, made, replayer.replay(), footprint_of(replayer, made)))
        return made, replayer


def tag(found: Capture, dropped: Collection[int], ops: Collection[int]) -> None:
    """Write a plan on the nodes of a joint graph: the values that it drops, and the ops that it re-runs for them. What reads an
    input that is overwritten is kept, whatever the plan says."""
    graph = found.graph
    rerun = set(ops)
    for node, value in found.value_of.items():
        if node.op != "placeholder":
            source = node.args[0] if node.target is getitem else None
            made_again = found.op_of.get(source, -1) in rerun or source not in found.op_of  # type: ignore[arg-type]
            again = value in dropped or graph.values[value].producer < 0
            compat.tag_recompute(node, again and made_again and node not in found.stale)
    for node, op in found.op_of.items():
        if node not in found.value_of:  # several outputs
            compat.tag_recompute(node, op in rerun)


def _read_inputs(joint: fx.GraphModule) -> None:
    """Have what reads an input of a nested region, which the region hands back for backward, read the input itself: it can be
    dropped then."""
    for node in joint.graph.nodes:
        region = compat.region_of(node)
        if region is None:
            continue
        *inside, output = region.nodes
        given = dict(zip((n for n in inside if n.op == "placeholder"), node.args[2:], strict=True))
        for user in list(node.users):
            source = given.get(output.args[0][user.args[1]])
            if isinstance(source, fx.Node):
                user.replace_all_uses_with(source)


def _gradients(
    joint: fx.GraphModule, num_fwd_outputs: int, static_lifetime_input_indices: Collection[int] | None = None, **_: Any
) -> tuple[int, int]:
    """Bytes of the gradients of parameters, and of those of other inputs."""
    made: Any = list(joint.graph.nodes)[-1].args[0][num_fwd_outputs:]  # type: ignore[index]
    static = set(static_lifetime_input_indices or ())
    found = [0, 0]
    for i, node in enumerate(made):
        if isinstance(node, fx.Node):
            found[i not in static] += compat.size_hint(node.meta["val"].untyped_storage().nbytes())
    return found[0], found[1]


def _device_of(joint: fx.GraphModule) -> torch.device:
    devices = {t.device for n in joint.graph.nodes if isinstance(t := n.meta.get("val"), torch.Tensor)}
    kinds = {d.type for d in devices}
    other = kinds - {"cpu", "cuda"}
    if other or not kinds:
        raise CaptureError(f"tensors on {', '.join(sorted(other)) or 'no device'}; torch-echo handles cpu and cuda")
    return next((d for d in sorted(devices, key=str) if d.type == "cuda"), torch.device("cpu"))
