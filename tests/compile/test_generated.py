"""What Inductor's code takes, looked up without a C++ compiler."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from torch_echo import compat
from torch_echo.compile._generated import peak_of_code
from torch_echo.compile._order import Block, Kernels, improved, peak_of
from torch_echo.cost import CostCache, Workspaces, device_key
from torch_echo.errors import CaptureError

N = 64
BYTES = 4 * N * N


def given(n: int) -> list[Tensor]:
    with compat.fresh_fake_mode():
        return [torch.empty(N, N) for _ in range(n)]


def decomposed(function: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    return module


def traced(function: Callable[..., Any], inputs: list[Tensor], names: list[str]) -> fx.GraphModule:
    """A graph whose inputs and outputs have these names, as a partitioner's graphs have."""
    module = decomposed(function, inputs)
    nodes = list(module.graph.nodes)
    outputs = nodes[-1].args[0]
    ends = [n for n in nodes if n.op == "placeholder"] + [n for n in outputs if n.op != "placeholder"]
    for node, name in zip(ends, names, strict=True):
        node._rename(name)
        if node.op == "placeholder":
            node.target = name
    module.recompile()
    return module


@pytest.fixture
def workspaces() -> Workspaces:
    return Workspaces(CostCache(device_key(torch.device("cpu"))))


def code_of(function: Callable[..., Any], n: int, order: compat.Order) -> str:
    inputs = given(n)
    module = decomposed(function, inputs)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return compat.generated_code(module, values, [], order, backward=False, visible=1).source


def two_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a @ a, b @ b.t()


class TestOrder:
    """Of Inductor's kernels, as :func:`torch_echo.compat.kernel_order` tells it to a function that may return another."""

    def test_is_followed(self) -> None:
        def products(source: str) -> list[str]:
            return re.findall(r"extern_kernels\.mm\((.*), out=", source)

        turned = products(code_of(two_products, 2, lambda *_: [1, 0]))
        as_it_is = products(code_of(two_products, 2, lambda *_: None))
        assert turned == as_it_is[::-1]
        assert len({*turned}) == 2

    def test_is_inductors_where_it_cant_be_read(self) -> None:
        def broken(*_: Any) -> None:
            raise KeyError("another torch")

        with pytest.warns(UserWarning, match="leaves the order of kernels to Inductor: KeyError"):
            assert "extern_kernels.mm(" in code_of(two_products, 2, broken)

    def test_what_it_is_told_takes_what_the_code_takes(self, workspaces: Workspaces) -> None:
        """Views into a larger buffer, several outputs of a call, what is written over, what never leaves its kernel."""
        told: list[int] = []

        def spy(waits: Any, blocks: Any, overwrites: Any, places: Any) -> Any:
            assert all(len({*each}) == len(waits) for each in places), "kernels have places of their own"
            made = Kernels(waits, [Block(*b) for b in blocks], overwrites)
            told.append(peak_of(made, range(len(waits))))
            return None

        def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            y = torch.relu(x @ w) * 2
            z = torch.cat([y @ w, torch.sin(y)])
            values, at = torch.sort(z)
            return (values.sum(), (torch.cos(values) * at @ w).sum())

        inputs = given(2)
        module = traced(function, inputs, ["primals_1", "primals_2", "a", "b"])
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        code = compat.generated_code(module, values, [], spy, backward=False, visible=2)
        meter = peak_of_generated(code, values, workspaces)
        assert told[0] == pytest.approx(meter, abs=1024)  # what sort takes for itself


def peak_of_generated(code: compat.Code, values: list[Tensor], workspaces: Workspaces) -> int:
    from torch_echo.compile._generated import _Meter

    meter = _Meter(workspaces)
    with compat.fresh_fake_mode() as fake:
        inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]
        meter.known(inputs)
        meter.run(code, inputs, fake)
    return meter.peak


class TestPeak:
    """One product forward, two backward: hand counts."""

    def parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            y = torch.tanh(x @ w)
            return y @ w, y, x, w

        def backward(y: Tensor, x: Tensor, w: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
            g = (tangent @ w.t()) * (1 - y * y)
            return g @ w.t(), x.t() @ g

        made = traced(forward, given(2), ["x", "w", "out", "y"])
        return made, traced(backward, given(4), ["y", "x", "w", "tangents_1", "gx", "gw"])

    def test_by_hand(self, workspaces: Workspaces) -> None:
        """Backward: the output, its gradient, y written over or beside g, then g and both gradients."""
        forward, backward = self.parts()
        held = peak_of_code(forward, backward, [True], workspaces)
        forward, backward = self.parts()
        let_go = peak_of_code(forward, backward, [False], workspaces)
        assert held == 4 * BYTES
        assert let_go == 3 * BYTES

    def test_what_is_saved_is_written_over(self, workspaces: Workspaces) -> None:
        """The output, its gradient, and y, over which the gradient of x is written: if it is not given out itself."""

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            y = torch.tanh(x)
            return y @ y, y

        def backward(y: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
            return (torch.sin(y) * tangent,)

        def peak() -> int:
            made = traced(forward, given(1), ["x", "out", "y"])
            return peak_of_code(made, traced(backward, given(2), ["y", "tangents_1", "gx"]), [True], workspaces)

        assert peak() == 3 * BYTES
        with torch._functorch.config.patch(donated_buffer=False):
            assert peak() == 4 * BYTES

    def test_is_that_of_the_order(self, workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
        """A chain of products that is read at the end, beside one of many: to be made late."""

        def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            early = [torch.mm(x, w + i) for i in range(4)]
            y = x
            for _ in range(6):
                y = torch.sin(torch.mm(y, w))
            for e in early:
                y = torch.mm(y, e)
            return (y,)

        def backward(tangent: Tensor) -> tuple[Tensor, ...]:
            return (tangent * 2,)

        def peak() -> int:
            made = traced(forward, given(2), ["x", "w", "out"])
            return peak_of_code(made, traced(backward, given(1), ["tangents_1", "g"]), [True], workspaces)

        mine = peak()
        monkeypatch.setattr("torch_echo.compile._generated.improved", lambda *_: None)
        assert mine <= peak()

    def test_code_of_another_form_is_refused(self) -> None:
        code = compat.Code("def call(args):\n    return args\n", {})
        with compat.fresh_fake_mode() as fake, pytest.raises(CaptureError, match="another form"):
            code.dry(fake)


def test_warnings_are_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        code_of(two_products, 2, improved)
