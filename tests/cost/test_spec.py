from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_echo.cost import Literal, SpecError, TensorSpec, materialize, spec_of

from ._calls import aten, calls, lstm_calls, randn

CALLS = calls()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class TestRoundTrip:
    @pytest.mark.parametrize("name", CALLS)
    def test_made_up_arguments_have_the_description_that_they_were_made_from(
        self, name: str, generator: torch.Generator
    ) -> None:
        func, args, kwargs = CALLS[name]
        spec = spec_of(func, args, kwargs)
        made, named = materialize(spec, generator)
        assert spec_of(func, made, named) == spec

    @pytest.mark.parametrize("name", CALLS)
    def test_the_op_runs_on_them_and_returns_what_it_would(self, name: str, generator: torch.Generator) -> None:
        func, args, kwargs = CALLS[name]
        made, named = materialize(spec_of(func, args, kwargs), generator)
        with torch.no_grad():
            real, result = func(*args, **kwargs), func(*made, **named)
        if name != "index by a mask":
            assert spec_of(func, [result]) == spec_of(func, [real])

    def test_what_a_recurrent_layer_dispatches(self, generator: torch.Generator) -> None:
        recorded = lstm_calls()
        assert any("rnn_layer" in str(func) for func, _, _ in recorded)
        for func, args, kwargs in recorded:
            made, named = materialize(spec_of(func, args, kwargs), generator)
            with torch.no_grad():
                func(*made, **named)

    def test_an_expanded_tensor_stays_expanded(self, generator: torch.Generator) -> None:
        (made, _), _ = materialize(spec_of(aten.add.Tensor, (randn(3, 1).expand(3, 9), 1)), generator)
        assert made.stride() == (1, 0)
        assert made.untyped_storage().nbytes() == 12

    def test_a_layout_without_strides_cannot_be_made_up(self, generator: torch.Generator) -> None:
        spec = spec_of(aten.neg.default, (torch.eye(3).to_sparse(),))
        with pytest.raises(SpecError, match="sparse_coo"):
            materialize(spec, generator)

    def test_nor_can_an_argument_of_unknown_type(self, generator: torch.Generator) -> None:
        spec = spec_of(aten.neg.default, (object(),))
        assert spec.args == (Literal("opaque", "builtins.object"),)
        with pytest.raises(SpecError, match="object"):
            materialize(spec, generator)


class TestDescription:
    def test_it_is_the_same_for_other_contents_and_another_place(self) -> None:
        x = randn(4, 6, 8)
        assert spec_of(aten.tanh.default, (x[0],)) == spec_of(aten.tanh.default, (x[3],))
        assert hash(spec_of(aten.tanh.default, (x[0],))) == hash(spec_of(aten.tanh.default, (x[3],)))

    def test_it_tells_aligned_from_misaligned_data(self) -> None:
        x = randn(64)
        assert spec_of(aten.tanh.default, (x[:32],)) == spec_of(aten.tanh.default, (x[4:36],))
        assert spec_of(aten.tanh.default, (x[:32],)) != spec_of(aten.tanh.default, (x[1:33],))

    @pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, False), (0.0, -0.0), ("1", 1), ([1], 1)])
    def test_it_tells_scalars_of_different_type(self, a: object, b: object) -> None:
        assert spec_of(aten.mul.Tensor, (randn(2), a)) != spec_of(aten.mul.Tensor, (randn(2), b))

    def test_parameters_are_tensors(self) -> None:
        x = randn(2, 2)
        assert spec_of(aten.tanh.default, (torch.nn.Parameter(x),)) == spec_of(aten.tanh.default, (x,))

    def test_fake_tensors_stand_for_real_ones(self) -> None:
        real = spec_of(aten.tanh.default, (randn(2, 3).t(),))
        with FakeTensorMode() as mode:
            assert spec_of(aten.tanh.default, (mode.from_tensor(randn(2, 3)).t(),)) == real

    def test_order_of_keyword_arguments_does_not_matter(self) -> None:
        x = randn(3)
        one = spec_of(aten._to_copy.default, (x,), {"dtype": torch.float64, "device": torch.device("cpu")})
        other = spec_of(aten._to_copy.default, (x,), {"device": torch.device("cpu"), "dtype": torch.float64})
        assert one == other

    def test_unique_bytes_count_an_expanded_dimension_once(self) -> None:
        assert TensorSpec((4, 6), (6, 1), "float32", "cpu").unique_bytes() == 96
        assert TensorSpec((4, 6), (0, 1), "float32", "cpu").unique_bytes() == 24
        assert TensorSpec((5, 3), (1, 1), "float32", "cpu").unique_bytes() == 28
        assert TensorSpec((0, 6), (0, 1), "float32", "cpu").unique_bytes() == 0

    def test_the_index_of_the_device_is_not_in_the_key(self) -> None:
        one, other = (TensorSpec((2,), (1,), "float32", f"cuda:{i}") for i in (0, 1))
        assert one.key() == other.key()

    def test_the_device_of_a_mixed_call_is_not_the_cpu(self) -> None:
        spec = spec_of(aten.mul.Tensor, (randn(2), torch.tensor(1.0)))
        assert spec.device() == torch.device("cpu")
        assert spec._replace(args=(spec.args[1], spec.args[0]._replace(device="cuda:1"))).device().index == 1


def test_keys_differ_and_are_the_same_in_another_process() -> None:
    keys = {name: spec_of(*call).key() for name, call in CALLS.items()}
    assert len(set(keys.values())) == len(keys)
    code = "import torch; from torch_echo.cost import spec_of; a = torch.ops.aten\n"
    code += "print(spec_of(a.addmm.default, (torch.randn(5), torch.randn(3, 4), torch.randn(4, 5))).key())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == keys["addmm"]


def test_indices_are_spread_over_the_rows(generator: torch.Generator) -> None:
    func, args, kwargs = CALLS["embedding"]
    made, _ = materialize(spec_of(func, args, kwargs), generator)
    assert 5 < made[1].unique().numel() <= 21
    assert made[1].max() < 50


def test_nothing_is_drawn_from_the_default_generator(generator: torch.Generator) -> None:
    before = torch.get_rng_state()
    for func, args, kwargs in CALLS.values():
        materialize(spec_of(func, args, kwargs), generator)
    assert torch.equal(torch.get_rng_state(), before)
