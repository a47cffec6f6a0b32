"""The planner: which feature maps to drop and rebuild. It knows :mod:`torch_echo.graph` and nothing of torch.

:func:`plan` is the way in: it takes a graph and a budget and returns a :class:`Plan`. Behind it, in the order in which
the parts run: ``_cut`` (the exact trade at given prices), ``_prices`` (which prices), ``_search`` (candidates, each
replayed), ``_front`` (those worth having), ``_explain`` (reasons). ``_paper`` is the rule of the Echo paper, a
baseline; ``_segments`` plans that rebuild values more than once; ``_bound`` what no plan can
beat; ``_share`` a budget divided among the graphs of a step.
"""

from torch_echo.planning._bound import Bound, bound
from torch_echo.planning._cut import MinCut
from torch_echo.planning._explain import Decision
from torch_echo.planning._front import Front, Point
from torch_echo.planning._paper import is_heavy
from torch_echo.planning._plan import DEFAULT_MAX_OVERHEAD, Plan, footprint_of, plan, unmet
from torch_echo.planning._prices import Prices
from torch_echo.planning._search import Effort, front
from torch_echo.planning._share import Choice, Member, choice_of, share, shared_peak

__all__ = [
    "DEFAULT_MAX_OVERHEAD",
    "Bound",
    "Choice",
    "Decision",
    "Effort",
    "Front",
    "Member",
    "MinCut",
    "Plan",
    "Point",
    "Prices",
    "bound",
    "choice_of",
    "footprint_of",
    "front",
    "is_heavy",
    "plan",
    "share",
    "shared_peak",
    "unmet",
]
