"""How long an op takes on this device: measured, or estimated from its FLOPs and bytes.

===================  ======================================================
``_spec``            description of an op call, and made-up arguments for it
``_flops``           FLOPs, bytes and elements of a call
``_measured``        durations by running
``_analytic``        durations by a calibrated roofline
``_gpu``             that of a GPU which is not there
``_cache``           the file that keeps both
``_model``           the interface, and the models by name
===================  ======================================================
"""

from torch_echo.cost._analytic import AnalyticCost
from torch_echo.cost._cache import CostCache, cache_folder, device_key
from torch_echo.cost._flops import Work, is_view, work_of, written
from torch_echo.cost._gpu import GPU, TYPICAL_GPU, gpu_cost
from torch_echo.cost._measured import MeasuredCost, clock, measure, undisturbed
from torch_echo.cost._model import COST_MODELS, CostModel, get_cost_model
from torch_echo.cost._spec import Literal, OpSpec, SpecError, TensorSpec, materialize, spec_of
from torch_echo.cost._workspace import Workspaces

__all__ = [
    "COST_MODELS",
    "GPU",
    "TYPICAL_GPU",
    "AnalyticCost",
    "CostCache",
    "CostModel",
    "Literal",
    "MeasuredCost",
    "OpSpec",
    "SpecError",
    "TensorSpec",
    "Work",
    "Workspaces",
    "cache_folder",
    "clock",
    "device_key",
    "get_cost_model",
    "gpu_cost",
    "is_view",
    "materialize",
    "measure",
    "spec_of",
    "undisturbed",
    "work_of",
    "written",
]
