"""A partitioner for AOTAutograd: plans a joint graph and has PyTorch split it accordingly.

The plan is written as recompute tags on the nodes of the forward pass, all in one region, for PyTorch's own partitioner, which
knows how to extract the two graphs, to replay random numbers and to put what is recomputed just before its first reader. Where
values are rebuilt more than once, which tags can't say, the re-runs are written into the graph (see ``_clone``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from torch_echo import compat, nested
from torch_echo.compile._capture import Capture, capture, is_alias
from torch_echo.compile._clone import clone
from torch_echo.compile._fusion import FusedCost
from torch_echo.compile._generated import peak_of_code
from torch_echo.compile._head import find, split
from torch_echo.compile._merge import merge
from torch_echo.compile._settle import LEVELS, settle
from torch_echo.compile._share import Shared
from torch_echo.compile._sums import write_parts
from torch_echo.cost import AnalyticCost, CostCache, CostModel, Workspaces, device_key, get_cost_model
from torch_echo.errors import BudgetInfeasible, CaptureError, TorchEchoError
from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.memory import live_bytes
from torch_echo.options import OnInfeasible, Options, refuse_check
from torch_echo.planning import DEFAULT_MAX_OVERHEAD, Front, Plan, Point, footprint_of, front, plan, unmet
from torch_echo.report.explanation import Explanation
from torch_echo.units import format_bytes

__all__ = ["Partitioner", "left", "plans", "tag"]

plans: list[Explanation] = []
"""Of the graphs that were compiled in this process, in order."""


left: list[str] = []
"""Why graphs were left to PyTorch's own partition, in order."""


_PARTS = (2, 4, 8, 16)
"""In which a loss head is tried, until more of them don't help."""
_WORTH = 0.02
"""Of the peak: logits below are left alone."""
_SMALLER, _FASTER = 0.02, 0.005
"""Fractions of peak and step by which a head in parts has to be better."""
_TRIES = 3
"""Plans whose code is looked up, if need be, beside the first one's."""
_LARGE = 3000
"""Nodes of a joint graph beyond which that takes too long."""


class Partitioner:
    """Called by AOTAutograd with each joint graph. `options` as for the tape. `fused`: the parts are for Inductor. `shared`: the
    other graphs of a step, if they are planned together."""

    def __init__(self, options: Options, fused: bool = False, shared: Shared | None = None) -> None:
        refuse_check(options)
        self.options = options
        self.fused = fused
        self.shared = shared
        self.plans: list[Plan] = []
        """Of the graphs that it was called with."""

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        try:
            _read_inputs(joint)
            joint.graph.eliminate_dead_code()
            merge(joint)
            if self.fused:
                write_parts(joint)
            device = _device_of(joint)
            cache = CostCache(device_key(device))
            cost = get_cost_model(self.options.cost, device, cache)
            if self.fused:
                cost = FusedCost(cost, AnalyticCost(cache, device))
            planner = _Planner(self.options, device, cost, Workspaces(cache), self.shared, kwargs["num_fwd_outputs"])
            chosen = planner.run(joint, _gradients(joint, **kwargs))
            if self.fused:
                chosen = planner.settled(chosen, lambda graph: compat.partition(graph, inputs, tagged=True, **kwargs))
            planner.refuse(chosen)
            cost.save()  # the cache, with the workspaces in it
        except BudgetInfeasible:
            raise
        except TorchEchoError as error:
            if self.options.strict:
                raise
            left.append(str(error))
            warnings.warn(f"torch-echo leaves a graph to PyTorch's own partition: {error}", stacklevel=2)
            return compat.partition(joint, inputs, tagged=False, **kwargs)
        plans.append(chosen.explanation)
        self.plans.append(chosen.plan)
        return compat.partition(chosen.emit(), inputs, tagged=True, **kwargs)


@dataclass(frozen=True)
class _Variant:
    """A joint graph that computes the same in another way than the one that was given, beside which its plans are told."""

    given: Explanation
    slower: float
    """Seconds that it takes longer without a plan."""
    note: str

    def told(self, own: Explanation) -> Explanation:
        """What is known of a plan for the variant, from where the given graph stands."""
        made = replace(
            own.plan,
            base_peak=self.given.plan.base_peak,
            extra_seconds=own.plan.extra_seconds + self.slower,
            step_seconds=self.given.plan.step_seconds,
            notes=[self.note, *own.plan.notes],
        )
        return replace(own, plan=made, before=self.given.before)


@dataclass
class _Planned:
    """A joint graph with its plan."""

    joint: fx.GraphModule
    found: Capture
    replayer: Replayer
    explanation: Explanation
    points: Front | None = None
    """Other plans to choose from."""
    variant: _Variant | None = None
    """If it is not the graph that was given."""

    @property
    def slower(self) -> float:
        """Seconds that it takes longer than the given graph, without a plan."""
        return 0.0 if self.variant is None else self.variant.slower

    @property
    def plan(self) -> Plan:
        return self.explanation.plan

    def emit(self) -> fx.GraphModule:
        """The joint graph with the plan written into it."""
        made = self.plan
        if made.groups:
            steps = nested.schedule(self.replayer, made.dropped, made.groups)
            clone(self.joint, self.found, made.dropped, made.groups, steps)
        else:
            tag(self.found, made.dropped, made.rerun)
        return self.joint

    def copy(self) -> _Planned:
        """The same with a joint graph of its own."""
        joint, node_of = _copied(self.joint)
        found = replace(
            self.found,
            op_of={node_of[node]: op for node, op in self.found.op_of.items()},
            value_of={node_of[node]: value for node, value in self.found.value_of.items()},
            stale={node_of[node] for node in self.found.stale},
        )
        return replace(self, joint=joint, found=found)


class _Planner:
    """Plans a joint graph, and where the options allow it the same graph with its loss head in parts; takes the better one."""

    def __init__(
        self,
        options: Options,
        device: torch.device,
        cost: CostModel,
        workspaces: Workspaces,
        shared: Shared | None,
        num_fwd_outputs: int,
    ) -> None:
        self.options, self.device, self.cost, self.workspaces = options, device, cost, workspaces
        self.shared = shared if options.policy == "echo" else None
        self.num_fwd_outputs = num_fwd_outputs
        self.budget = options.budget_bytes(device)
        self.live = live_bytes(device)

    def run(self, joint: fx.GraphModule, gradients: tuple[int, int]) -> _Planned:
        """`gradients`: bytes of those of parameters and of other inputs."""
        found = self._capture(joint)
        if found.region:
            # Planned by itself, without a budget: what is left of it when others are planned is not known yet.
            self.budget, self.shared = None, None
        first = self._among_others(joint, found, gradients) if self.shared else None
        best = first = first or self._alone(joint, found, self.options.max_overhead)
        free = not found.region and (self.shared is None or not self.shared.chosen)
        if free and self._much_for_layout(first):
            given, _ = _copied(joint)
            compat.keep_layouts(given)
            note = "convolutions take tensors laid out as they come; with channels last they would allocate more"
            one = self._varied(given, first, note)
            if one is not None and self._better(one.plan, best.plan):
                best, joint = one, given
        whole = best
        head = find(joint, self.num_fwd_outputs) if free and self.options.reorder else None
        if head is not None and _nbytes(head.logits) >= _WORTH * first.plan.peak:
            for parts in (n for n in _PARTS if n <= head.units):
                divided = split(joint, head, parts)
                note = f"loss head in {parts} parts: results are equal up to the order of summation"
                one = None if divided is None else self._varied(divided, first, note)
                if one is not None and self._better(one.plan, best.plan):
                    best = one
                elif best is not whole:
                    break
        if self.shared is not None and best is not first:
            self.shared.leave()
        return best

    def refuse(self, chosen: _Planned) -> None:
        """Raises BudgetInfeasible for a plan that takes more than the budget, if that is not to be settled with other graphs."""
        among_others = self.shared is not None and (self.shared.among_others or bool(self.shared.chosen))
        if self.budget is not None and chosen.plan.peak > self.budget:
            if self.options.on_infeasible == "raise" and not among_others:
                held = [(layer, kind, n) for (layer, kind), n in chosen.explanation.after.composition().items()]
                raise BudgetInfeasible(self.budget, chosen.plan.peak, held)
            if unmet(self.budget) not in chosen.plan.notes:
                chosen.plan.notes.append(unmet(self.budget))

    def settled(self, chosen: _Planned, split: Callable[[fx.GraphModule], Any]) -> _Planned:
        """The plan with the peak of the code that Inductor makes of it; another one, where that one's is not what is asked for.
        `split`: PyTorch's partitioner."""
        if chosen.found.region:
            return chosen
        graph = chosen.found.graph
        known = compat.mutated_inputs(chosen.joint.graph)
        held = [mutated is None for mutated in known][: self.num_fwd_outputs]
        looked_up: dict[Point, _Planned] = {}

        def peak_of(point: Point) -> int:
            one = chosen
            if looked_up:
                made = self._plan(graph, self.options.max_overhead, "least", chosen.points, point)
                one = self._planned(chosen.joint, chosen.found, made, chosen.variant)
            looked_up[point] = one
            parts = split(one.copy().emit())
            return graph.start_bytes + peak_of_code(parts[0], parts[1], held, self.workspaces)

        points = chosen.points.points if chosen.points is not None else []
        tries = _TRIES if points and len(chosen.joint.graph.nodes) <= _LARGE else 0
        limit = DEFAULT_MAX_OVERHEAD if self.options.max_overhead is None else self.options.max_overhead
        made = chosen.plan
        same = (p for p in points if (p.dropped, p.groups) == (made.dropped, made.groups))
        seconds = made.extra_seconds - chosen.slower
        first = Point(made.dropped, chosen.explanation.after.peak, seconds, "chosen", made.groups)
        try:
            point, peak = settle(
                points,
                next(same, first),
                peak_of,
                budget=self.budget,
                seconds=limit * made.step_seconds - chosen.slower,
                levels=[max(0.0, level * made.step_seconds - chosen.slower) for level in LEVELS],
                eager=lambda: self._eager_peak(chosen),
                tries=tries,
            )
        except Exception as error:  # whatever Inductor does with a graph that it has not been asked to compile yet
            reason = f"the peak is the replay's: Inductor's code could not be looked at ({error})"
            if not isinstance(error, CaptureError):
                warnings.warn(f"torch-echo: {reason}", stacklevel=2)
            made.notes.append(reason)
            return chosen
        best = looked_up[point]
        notes = [f"the peak is that of Inductor's code; the replay's is {format_bytes(best.explanation.after.peak)}"]
        if best is not chosen:
            notes.append(
                f"{len(looked_up)} plans were looked up in Inductor's code; the replay alone would have chosen another"
            )
        if self.budget is not None:  # as replayed it may not be met
            notes = [*(n for n in best.plan.notes if n != unmet(self.budget)), *notes]
        else:
            notes = [*best.plan.notes, *notes]
        final = replace(best.plan, peak=peak, floor=min(best.plan.floor, peak), notes=notes)
        if self.shared is not None and chosen.points is not None and chosen.variant is None:
            self.shared.took(final)
        return replace(best, explanation=replace(best.explanation, plan=final))

    def _eager_peak(self, chosen: _Planned) -> int:
        """What the graph takes with PyTorch's kernels, when nothing is dropped."""
        found = capture(chosen.joint, self.num_fwd_outputs, None, self.workspaces)
        return chosen.found.graph.base_bytes + Replayer(found.graph).replay().peak

    def _alone(
        self, joint: fx.GraphModule, found: Capture, max_overhead: float | None, variant: _Variant | None = None
    ) -> _Planned:
        points = front(found.graph, nested=True) if self.options.policy == "echo" else None
        made = self._plan(found.graph, max_overhead, "least", points)
        return replace(self._planned(joint, found, made, variant), points=points)

    def _among_others(self, joint: fx.GraphModule, found: Capture, gradients: tuple[int, int]) -> _Planned:
        """A graph as it is, with the plan that was chosen for it among the others of a step, or the first to offer them."""
        assert self.shared is not None
        points = front(found.graph, nested=True)
        chosen = self.shared.meet(found.graph, points, gradients)
        made = self._plan(found.graph, self.options.max_overhead, "least", points, chosen)
        self.shared.took(made)
        return replace(self._planned(joint, found, made), points=None if chosen else points)

    @staticmethod
    def _planned(joint: fx.GraphModule, found: Capture, made: Plan, variant: _Variant | None = None) -> _Planned:
        replayer = Replayer(found.graph)
        explanation = Explanation(found.graph, made, replayer.replay(), footprint_of(replayer, made))
        if variant is not None:
            explanation = variant.told(explanation)
        return _Planned(joint, found, replayer, explanation, variant=variant)

    def _much_for_layout(self, planned: _Planned) -> bool:
        """Do convolutions take much memory for themselves, for which Inductor lays tensors out? (oneDNN's of one channel do.)"""
        if self.device.type != "cpu" or not isinstance(self.cost, FusedCost) or self.options.policy != "echo":
            return False
        ops = planned.found.graph.ops
        spent = (ops[op].workspace for node, op in planned.found.op_of.items() if compat.is_convolution(node))
        return max(spent, default=0) >= _WORTH * planned.plan.peak

    def _varied(self, joint: fx.GraphModule, first: _Planned, note: str) -> _Planned | None:
        """A variant of a graph, planned to take no longer in all than what is asked for; None if it does anyway."""
        found = self._capture(joint)
        graph, whole = found.graph, first.plan.step_seconds
        variant = _Variant(first.explanation, max(0.0, graph.step_seconds - whole), note)
        limit = self.options.max_overhead
        if self.budget is None and graph.step_seconds:
            asked = DEFAULT_MAX_OVERHEAD if limit is None else limit
            limit = (asked * whole - variant.slower) / graph.step_seconds
            if limit < 0:
                return None
        return self._alone(joint, found, limit, variant)

    def _capture(self, joint: fx.GraphModule) -> Capture:
        found = capture(joint, self.num_fwd_outputs, self.cost, self.workspaces)
        found.graph.base_bytes = max(0, self.live - found.graph.older_bytes)
        return found

    def _plan(
        self,
        graph: TrainingGraph,
        max_overhead: float | None,
        on_infeasible: OnInfeasible,
        points: Front | None = None,
        chosen: Point | None = None,
    ) -> Plan:
        return plan(
            graph,
            budget=self.budget,
            max_overhead=max_overhead,
            policy=self.options.policy,
            on_infeasible=on_infeasible,
            front=points,
            chosen=chosen,
            nested=True,
        )

    def _better(self, one: Plan, other: Plan) -> bool:
        """Is a plan better than another for what is asked, by more than is lost in the noise of estimates?"""
        if self.budget is not None and one.peak <= self.budget:
            return other.peak > self.budget or one.extra_seconds < other.extra_seconds - _FASTER * one.step_seconds
        return one.peak < (1 - _SMALLER) * other.peak


def tag(found: Capture, dropped: Collection[int], ops: Collection[int]) -> None:
    """Write a plan on the nodes of a joint graph: the values that it drops, and the ops that it re-runs for them. What reads an
    input that is overwritten is kept, whatever the plan says. Of what is kept, views are made again: Inductor writes over what
    backward was given when it has been read, and does not see that two saved tensors share memory."""
    graph = found.graph
    rerun = set(ops)
    for node, value in found.value_of.items():
        if node.op != "placeholder":
            source = node.args[0] if node.target is getitem else None
            made_again = found.op_of.get(source, -1) in rerun or source not in found.op_of  # type: ignore[arg-type]
            again = value in dropped or graph.values[value].producer < 0 or is_alias(node)
            recompute = again and made_again and node not in found.stale
            compat.tag_recompute(node, recompute)
            if recompute and source is not None and source not in found.op_of:  # one that makes several views
                compat.tag_recompute(source, True)  # type: ignore[arg-type]
    for node, op in found.op_of.items():
        if node not in found.value_of:  # several outputs
            compat.tag_recompute(node, op in rerun)


def _copied(joint: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A joint graph once more, and what its nodes are there."""
    graph = fx.Graph()
    node_of: dict[fx.Node, fx.Node] = {}
    found: Any = graph.graph_copy(joint.graph, node_of, return_output_node=True)
    returned, output = found
    node_of[output] = graph.output(returned, type_expr=getattr(output, "type", None))
    node_of[output].meta = dict(output.meta)
    return fx.GraphModule(joint, graph), node_of


def _nbytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.untyped_storage().nbytes()


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
