"""Small random programs of tensor ops, as modules.

A program is data: nested lists of instructions, drawn by hypothesis, interpreted by :class:`Block`. Every value in a block's
pool has the shape (ROWS, COLS), whatever its strides, so that any two can meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

__all__ = ["Program", "Spec", "drawn", "program_loss", "programs"]

ROWS, COLS = 24, 32
Instruction = tuple[str, int, int, int]

BINARY = ("add", "mul", "sub_row", "mul_column", "matmul", "addcmul", "where", "cat", "stack", "minimum")
UNARY = (
    *("tanh", "sigmoid", "relu", "exp", "softmax", "gelu", "square", "layer_norm", "batch_norm", "linear", "dropout"),
    *("native_dropout", "alpha_dropout", "max_pool", "embedding", "masked_fill", "cumsum", "sort", "std", "detach"),
    *("cross_entropy", "cross_entropy"),
)
VIEWS = ("transpose", "reshape", "slice", "expand_row", "expand_column", "chunk", "strided", "select", "narrow", "flip")
IN_PLACE = (
    "chain",
    "view_chain",
    "gates",
    "fill",
    "copy",
    "bernoulli",
    "index",
    "zeros",
    "any_relu",
    "any_add",
    "twice",
)
BRANCHES = ("if_data", "if_step", "loop")
GUESTS = (
    *(
        "checkpoint",
        "checkpoint_reentrant",
        "lstm",
        "gru",
        "packed",
        "gradient",
        "func_grad",
        "vmap",
        "no_grad",
        "autocast",
    ),
    *(
        "double",
        "complex",
        "function",
        "foreign_hooks",
        "foreign_mode",
        "sparse",
        "nested",
        "conv",
        "attention",
        "hook",
    ),
)
"""What has a life of its own: regions, transforms, types and layers with other rules."""


@dataclass(frozen=True)
class Spec:
    """Blocks of instructions, and the order in which the program calls them."""

    blocks: tuple[tuple[Instruction, ...], ...]
    calls: tuple[int, ...]

    @property
    def static(self) -> bool:
        """Does the program run the same ops in each step?"""
        return not self.uses({"if_data", "if_step"})

    def uses(self, names: set[str]) -> bool:
        """Is one of these among the instructions?"""
        return any(name in names for block in self.blocks for name, *_ in block)


def programs(max_ops: int = 10, guests: bool = False) -> st.SearchStrategy[Spec]:
    """Programs of one to three blocks."""
    kinds: list[tuple[str, ...]] = [BINARY, UNARY, UNARY, VIEWS, IN_PLACE, IN_PLACE, BRANCHES]
    if guests:
        kinds += [GUESTS, GUESTS, GUESTS]
    number = st.integers(0, 11)
    name = st.one_of(*(st.sampled_from(kind) for kind in kinds))
    block = st.lists(st.tuples(name, number, number, number), min_size=2, max_size=max_ops).map(tuple)
    return st.lists(block, min_size=1, max_size=3).flatmap(
        lambda blocks: st.builds(
            Spec,
            st.just(tuple(blocks)),
            st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=4).map(tuple),
        )
    )


def drawn(examples: int, seed: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that is `given` something runs on so many examples, drawn from the seed."""
    fixed = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    return lambda test: hypothesis_seed(seed)(fixed(test))


class Block(nn.Module):
    """Interprets one block: a pool of values that grows with each instruction."""

    def __init__(self, code: tuple[Instruction, ...]) -> None:
        super().__init__()
        self.code = code
        self.linear = nn.Linear(COLS, COLS)
        self.norm = nn.LayerNorm(COLS)
        self.batch_norm = nn.BatchNorm1d(COLS)
        self.embedding = nn.Embedding(5, COLS)
        self.dropout = nn.Dropout(0.3)
        self.alpha = nn.AlphaDropout(0.2)
        self.scale = nn.Parameter(torch.randn(COLS) * 0.1 + 1)
        used = {name for name, *_ in code}
        if used & {"lstm", "packed"}:
            self.lstm = nn.LSTM(COLS, COLS // 2, num_layers=2, bidirectional=True, dropout=0.1)
        if "gru" in used:
            self.gru = nn.GRU(COLS, COLS, batch_first=True)
        if "sparse" in used:
            self.sparse = nn.Embedding(5, COLS, sparse=True)
        if "conv" in used:
            self.conv = nn.Conv1d(ROWS, ROWS, 3, padding=1)
        if "attention" in used:
            self.attention = nn.MultiheadAttention(COLS, 4, dropout=0.1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        pool = [x, self.linear(x), x * self.scale]
        for instruction in self.code:
            pool.append(self.run(pool, instruction, step))
        return pool[-1] + 0.1 * pool[len(pool) // 2]

    def run(self, pool: list[Tensor], instruction: Instruction, step: int) -> Tensor:
        name, i, j, k = instruction
        a, b, c = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)], pool[-1 - k % len(pool)]
        return getattr(self, f"do_{name}")(a, b, c, k, step)

    # Two operands.

    def do_add(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a + b

    def do_mul(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.tanh(a) * b

    def do_sub_row(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a - b[:1]

    def do_mul_column(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return b[:, k : k + 1].sigmoid() * a

    def do_matmul(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return (a @ b.t()).softmax(1) @ c

    def do_addcmul(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.addcmul(a, b.sigmoid(), c, value=0.5)

    def do_where(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.where(a > b, a, c)

    def do_minimum(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.minimum(a, b * self.scale)

    def do_cat(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.cat([a, b, c])[k : k + ROWS]

    def do_stack(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.stack([a, b, c], k % 3).mean(k % 3)

    # One operand.

    def do_tanh(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.tanh(a)

    def do_sigmoid(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.sigmoid(a)

    def do_relu(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.relu(a)

    def do_exp(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.clamp(-2, 2).exp()

    def do_softmax(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.softmax(k % 2)

    def do_gelu(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return F.gelu(a, approximate="tanh" if k % 2 else "none")

    def do_square(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.clamp(-1, 1).square()

    def do_layer_norm(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.norm(a)

    def do_batch_norm(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.batch_norm(a)

    def do_linear(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.linear(a)

    def do_dropout(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.dropout(a)

    def do_native_dropout(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.native_dropout(a, 0.3, True)[0]

    def do_alpha_dropout(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.alpha(a)

    def do_max_pool(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return F.max_pool1d(a[None], 3, 1, 1)[0]

    def do_embedding(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.embedding((torch.arange(ROWS) * (k + 1)) % 5) + a

    def do_masked_fill(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.masked_fill(b > 0, 0.5)

    def do_cumsum(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.cumsum(0) * 0.1

    def do_sort(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        values, indices = a.sort(1)
        return values + b.gather(1, indices)

    def do_std(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        std, mean = torch.std_mean(a, 1, keepdim=True)
        return (a - mean) / (std + 1)

    def do_cross_entropy(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        target = (torch.arange(ROWS) * (k + 1)) % COLS
        logits = self.linear(a) if k % 2 else a
        reduction = ("mean", "sum", "none")[k % 3]
        loss = F.cross_entropy(logits, target, ignore_index=k, label_smoothing=0.1 * (k % 4), reduction=reduction)
        return b * torch.tanh(loss).view(-1, 1)

    def do_detach(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.detach() + b

    # Views.

    def do_transpose(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.t().reshape(ROWS, COLS) if k % 2 else a.t().contiguous().t()

    def do_reshape(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.reshape(COLS, ROWS).t().reshape(ROWS, COLS)

    def do_slice(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.cat([a, b], 1)[:, k : 2 * COLS : 1][:, :COLS]

    def do_expand_row(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a[k % ROWS].expand(ROWS, COLS)

    def do_expand_column(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a[:, k : k + 1].expand(ROWS, COLS)

    def do_chunk(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        left, right = a.chunk(2, 1)
        return torch.cat([right, left], 1)

    def do_strided(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.cat([a, b], 1)[:, k % 2 :: 2]

    def do_select(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.stack([a, b, c])[k % 3]

    def do_narrow(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return F.pad(a, (0, 0, 2, 2)).narrow(0, k % 5, ROWS)

    def do_flip(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return a.flip(k % 2).unfold(1, COLS, 1).squeeze(1)

    # In place, on temporaries and on what may be needed: plain PyTorch decides which of these are errors.

    def do_chain(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out = a * 1.5
        out.add_(b).mul_(0.5)
        return (out.sigmoid_, out.relu_, out.tanh_, out.neg_)[k % 4]()

    def do_view_chain(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out = a + b
        out[:, ::2].mul_(0.5)
        out[k % ROWS :].add_(c[k % ROWS :])
        return out.view(COLS, ROWS).relu_().view(ROWS, COLS)

    def do_gates(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        i, f, g = torch.cat([a, b, c], 1).unsafe_chunk(3, 1)
        i, f, g = i.sigmoid_(), f.sigmoid_(), g.tanh_()
        return f * c + i * g

    def do_fill(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out = torch.empty_like(a)
        out.fill_(0.5)[: k + 1].copy_(a[: k + 1])
        return out * b

    def do_copy(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out = torch.zeros(ROWS, COLS)
        out[:, :k] = a[:, :k]
        out[:, k:] += b[:, k:]
        return out

    def do_bernoulli(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        mask = torch.empty(ROWS, COLS).bernoulli_(0.7)
        noise = torch.randn_like(mask).mul_(mask)
        return a * mask + 0.1 * noise

    def do_index(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out = a.clone()
        out[b > 0.5] = 0.1
        return out.index_add_(0, torch.arange(k + 1) % ROWS, b[: k + 1])

    def do_zeros(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        total = torch.zeros_like(a)
        for part in (a, b, c):
            total += part.sigmoid()
        return total

    def do_any_relu(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.own(a).relu_() if k % 3 == 0 else a.relu()

    def do_any_add(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.own(a).add_(b.sigmoid()) if k % 2 == 0 else a + b

    def do_twice(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        first = torch.tanh(a)
        second = first * b  # saves `first`
        if k % 6 == 0:
            first.add_(1)  # too early: an error in backward
        return second + first

    @staticmethod
    def own(a: Tensor) -> Tensor:
        """`a`, or a copy where it overlaps itself or is not to be written."""
        return a.clone() if 0 in a.stride() or a.is_leaf else a

    # Control flow.

    def do_if_data(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.tanh(a) * b if float(a.detach().sum()) > 0 else self.dropout(torch.sigmoid(b))

    def do_if_step(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        if step % 2:
            return self.linear(a).tanh()
        return (a + b).relu_()

    def do_loop(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        for _ in range(1 + k % 4):
            a = torch.tanh(self.linear(a)) + b
        return a

    # Guests.

    def do_checkpoint(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return checkpoint(lambda x, y: torch.tanh(self.dropout(self.linear(x))) * y, a, b, use_reentrant=False)

    def do_checkpoint_reentrant(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return checkpoint(lambda x, y: torch.sigmoid(self.linear(x)) * y, a, b, use_reentrant=True)

    def do_lstm(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        out, (h, _) = self.lstm(torch.stack([a[:, :COLS], b.sigmoid()], 1))
        return out[:, 0] + out[:, 1] + h[0, 0].repeat(2)

    def do_gru(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return self.gru(a[None])[0][0] * b

    def do_packed(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        both = torch.stack([a, b], 1)
        packed = nn.utils.rnn.pack_padded_sequence(both, torch.tensor([ROWS - k, ROWS]), enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        return out.sum(1)

    def do_gradient(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        """A backward pass within forward, and one through it."""
        with torch.enable_grad():
            x = a if a.requires_grad else a.clone().requires_grad_()
            y = torch.tanh(self.linear(x)).square().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=bool(k % 2))
        return gradient * 0.1 + b

    def do_func_grad(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.func.grad(lambda x: (torch.tanh(x) * b).sum())(a) + a

    def do_vmap(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.func.vmap(lambda x, y: torch.tanh(x) * y.sigmoid())(a, b)

    def do_no_grad(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        with torch.no_grad():
            scale = torch.tanh(self.linear(a)).abs().add_(0.5)
        return b * scale

    def do_autocast(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(self.linear(a)).float() * b

    def do_double(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return (torch.tanh(a.double()) * b.double().sigmoid()).float()

    def do_complex(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        z = torch.complex(a, b).tanh()
        return (z * z.conj()).real + (z.imag if k % 2 else z.abs())

    def do_function(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return Cubed.apply(a.sigmoid()) * b

    def do_foreign_hooks(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        if k % 2:
            with torch.autograd.graph.save_on_cpu():
                # Not tanh: what an op saves of its own output is left on a CPU as it is, in a cycle that only backward breaks.
                y = torch.sin(a) * b
            return y.sigmoid()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = torch.tanh(a) * b
        return y.sigmoid()

    def do_foreign_mode(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        with Counts():
            y = torch.tanh(a)
        return y * b

    def do_sparse(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.tanh(self.sparse((torch.arange(ROWS) * (k + 1)) % 5)) * a

    def do_nested(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        ragged = torch.nested.as_nested_tensor([a[: 1 + k], b[1 + k :]], layout=torch.jagged)
        return torch.cat(list((torch.tanh(ragged) * 2).unbind()))

    def do_conv(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        return torch.relu(self.conv(a[None]))[0] + b

    def do_attention(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        if k % 2:
            q, kk, v = (t.reshape(1, 2, ROWS // 2, COLS) for t in (a, b, c))
            return F.scaled_dot_product_attention(q, kk, v).reshape(ROWS, COLS)
        return self.attention(a, b, c, need_weights=k % 4 == 0)[0]

    def do_hook(self, a: Tensor, b: Tensor, c: Tensor, k: int, step: int) -> Tensor:
        y = torch.tanh(a)
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return y * b


class Cubed(torch.autograd.Function):
    """Saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * (3 * x * x + 0 * y)


class Counts(TorchDispatchMode):
    """A mode of the script's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Program(nn.Module):
    """Calls its blocks in the order of the spec."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.calls = spec.calls
        self.blocks = nn.ModuleList(Block(code) for code in spec.blocks)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for index in self.calls:
            x = self.blocks[index](x, step)
        return x


def program_loss(model: nn.Module, i: int) -> Tensor:
    """A loss with some ops of its own."""
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(i))
    out: Any = model(x, i)
    return out.clamp(-3, 3).square().mean()
