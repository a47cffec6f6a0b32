"""The zoo: small models of many kinds, each with the step of a plain training script."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from .harness import Case, Step

__all__ = ["CASES", "classify_step", "normal", "simple_step", "tokens"]

VOCAB = 61
ROOT = Path(__file__).resolve().parents[2]


def normal(i: int, *shape: int) -> Tensor:
    """Data of step `i`, drawn from a generator of its own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + i))


def tokens(i: int, *shape: int, high: int = VOCAB) -> Tensor:
    """Token ids of step `i`."""
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(2000 + i))


def simple_step(loss_of: Callable[[nn.Module, int], Tensor]) -> Step:
    """The usual iteration around a loss."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        return loss

    return step


def language_step(batch: int, length: int) -> Step:
    """Next-token prediction with a model that returns logits."""

    def loss_of(model: nn.Module, i: int) -> Tensor:
        ids = tokens(i, batch, length + 1)
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return simple_step(loss_of)


def classify_step(*shape: int, classes: int = 7) -> Step:
    """Classification of noise."""

    def loss_of(model: nn.Module, i: int) -> Tensor:
        x, y = normal(i, *shape), tokens(i, shape[0], high=classes)
        return F.cross_entropy(model(x), y)

    return simple_step(loss_of)


# --- recurrent -----------------------------------------------------------------------------------------------------


class RecurrentLM(nn.Module):
    """Embedding, dropout, a recurrent layer of PyTorch's, logits."""

    def __init__(self, kind: str, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.dropout = nn.Dropout(0.2)
        self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True, dropout=0.3)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.rnn(self.dropout(self.embedding(ids)))
        return self.head(self.dropout(out.contiguous()))


class AttentionDecoder(nn.Module):
    """LSTMCell with additive attention and input feeding, in a Python loop."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.cell = nn.LSTMCell(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.mix = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, memory: Tensor, ids: Tensor) -> Tensor:
        keys = self.key(memory)
        h = c = feed = memory.new_zeros(memory.shape[0], memory.shape[2])
        out = []
        for t in range(ids.shape[1]):
            h, c = self.cell(torch.cat([self.embedding(ids[:, t]), feed], 1), (h, c))
            weights = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).softmax(1)
            feed = self.dropout(torch.tanh(self.mix(torch.cat([h, (weights * memory).sum(1)], 1))))
            out.append(self.head(feed))
        return torch.stack(out, 1)


def decoder_loss(model: nn.Module, i: int) -> Tensor:
    ids = tokens(i, 8, 11)
    logits = model(normal(i, 8, 12, 32), ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def nmt_modules() -> tuple[Any, Any]:
    """Modules ``model`` and ``data`` of the translation example."""
    folder = str(ROOT / "examples" / "nmt")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("model"), importlib.import_module("data")
    finally:
        sys.path.remove(folder)
        for name in ("model", "data"):
            sys.modules.pop(name, None)


def build_nmt() -> nn.Module:
    model: nn.Module = nmt_modules()[0].Seq2Seq(VOCAB, 24, 24)
    return model


def nmt_step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    src, ids = tokens(i, 8, 9), tokens(i + 50, 8, 9)
    lengths = torch.tensor([9, 9, 8, 7, 7, 6, 3, 1])
    for row, length in zip(src, lengths.tolist(), strict=True):
        row[length:] = 0
    optimizer.zero_grad()
    logits = model(src, lengths, ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


# --- transformers --------------------------------------------------------------------------------------------------


class TransformerLM(nn.Module):
    """PyTorch's encoder layers with a causal mask."""

    def __init__(self, width: int = 32, layers: int = 2, norm_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids), mask=mask, is_causal=True))


def build_gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    )


def gpt2_loss(model: nn.Module, i: int) -> Tensor:
    ids = tokens(i, 4, 24)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def build_bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes))


def bert_loss(model: nn.Module, i: int) -> Tensor:
    ids = tokens(i, 4, 24)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return loss


def build_t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **sizes))


def t5_loss(model: nn.Module, i: int) -> Tensor:
    loss: Tensor = model(input_ids=tokens(i, 4, 16), labels=tokens(i + 9, 4, 12)).loss
    return loss


# --- convolutional -------------------------------------------------------------------------------------------------


def build_resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=7)
    )


def resnet_loss(model: nn.Module, i: int) -> Tensor:
    loss: Tensor = model(pixel_values=normal(i, 4, 3, 32, 32), labels=tokens(i, 4, high=7)).loss
    return loss


class UNet(nn.Module):
    """Two stages down, two up, skip connections; BatchNorm; ReLU in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(self.block(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)),
            *(nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x if not skips else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), skips.pop()], 1))
        return self.head(x)


def unet_loss(model: nn.Module, i: int) -> Tensor:
    return F.cross_entropy(model(normal(i, 2, 3, 16, 16)), tokens(i, 2, 16, 16, high=2))


def build_cnn() -> nn.Module:
    """BatchNorm, ReLU in place, average pooling, Dropout2d and a strided convolution."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU(inplace=True), nn.Dropout2d(0.2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 7)),
    )


class Speech(nn.Module):
    """In the manner of DeepSpeech2: convolutions over time with BatchNorm and Hardtanh, a bidirectional RNN, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(12, 16, 5, stride=2), nn.BatchNorm1d(16), nn.Hardtanh(0, 20, inplace=True))
        self.rnn = nn.RNN(16, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.conv(x).transpose(1, 2))
        return self.head(out).log_softmax(-1).transpose(0, 1)


def speech_loss(model: nn.Module, i: int) -> Tensor:
    scores = model(normal(i, 4, 12, 40))
    return F.ctc_loss(scores, tokens(i, 4, 6, high=9), torch.full((4,), scores.shape[0]), torch.full((4,), 6))


# --- ways of writing -----------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linear layers with tanh and dropout."""

    def __init__(self, width: int = 32, layers: int = 4, out: int = 7, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return self.head(x)


class Tied(TransformerLM):
    """The embedding is the output matrix too."""

    def __init__(self) -> None:
        super().__init__(norm_first=False)
        self.head.weight = self.embedding.weight


def build_frozen() -> nn.Module:
    model = MLP(layers=5)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    return model


class SwishFunction(torch.autograd.Function):
    """x * sigmoid(x) with a hand-written backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * torch.sigmoid(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + y * (1 - s))


class WithFunction(MLP):
    """Activations by a custom autograd.Function."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(SwishFunction.apply(layer(x)).mul(1.5)))
        return self.head(x)


def write(tensor: Tensor, content: Any) -> None:
    """By a kernel that is no op, as Triton's are: no dispatcher sees it, no version tells of it."""
    content = np.ascontiguousarray(content, dtype=np.float32)
    assert content.nbytes == tensor.nbytes and tensor.is_contiguous()
    ctypes.memmove(tensor.data_ptr(), content.ctypes.data, content.nbytes)


class Written(torch.autograd.Function):
    """tanh(x) by such a kernel. `how`: into new memory, over a copy, or also over x itself, which then holds the derivative (as
    fused losses do with logits)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        out = x.clone() if how == "copy" else torch.empty_like(x) if how == "empty" else torch.zeros_like(x)
        write(out, np.tanh(x.tolist()))
        ctx.how = how
        if how == "input":
            write(x, 1 - np.square(out.tolist()))
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return grad * (saved if ctx.how == "input" else 1 - saved * saved), None


class WithUnseenWrites(MLP):
    """Activations and a table that something else than ops has written."""

    def forward(self, x: Tensor) -> Tensor:
        for layer, how in zip(self.layers, ("empty", "copy", "input", "zeros"), strict=False):
            scale = torch.empty(x.shape[0], 1) if how != "copy" else torch.ones(x.shape[0], 1)
            write(scale, 1 + np.tanh(x[:, :1].tolist()))
            x = self.dropout(torch.tanh(Written.apply(layer(x), how) * scale.clamp_min(0.1)))
        return self.head(x)


@torch.library.custom_op("torch_echo_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """x ** 3, opaque to PyTorch."""
    return torch.from_numpy(x.detach().numpy() ** 3)


def _cube_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _cube_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * 3 * x * x


torch.library.register_autograd("torch_echo_tests::cube", _cube_backward, setup_context=_cube_setup)


class WithOp(MLP):
    """Activations by a custom op."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(cube(layer(x).tanh()) + x))
        return self.head(x)


def build_module_hooks() -> nn.Module:
    model = MLP()
    first, second, third = model.layers[0], model.layers[1], model.layers[2]
    first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    second.register_forward_hook(lambda module, args, out: torch.sigmoid(out))
    third.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    third.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 2,))
    return model


class WithTensorHooks(MLP):
    """Gradients of intermediate tensors are changed and kept by hooks."""

    def forward(self, x: Tensor) -> Tensor:
        self.norms: list[float] = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            x.register_hook(lambda grad: self.norms.append(float(grad.norm())))
            x = self.dropout(x)
        return self.head(x)


class WithRetainGrad(MLP):
    """Intermediate gradients are part of the loss's report."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.retain_grad()
            self.kept.append(x)
            x = self.dropout(x)
        return self.head(x)


def retain_grad_step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(normal(i, 64, 32)), tokens(i, 64, high=7))
    loss.backward()
    optimizer.step()
    return [loss, *(x.grad for x in model.kept), *model.kept]


class WithCheckpoint(nn.Module):
    """Blocks under the user's own checkpointing, with others around them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = MLP(out=32), MLP()
        self.blocks = nn.ModuleList(MLP(layers=2, out=32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.last(x)


def autocast_loss(model: nn.Module, i: int) -> Tensor:
    ids = tokens(i, 4, 17)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def accumulation_step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
    optimizer.zero_grad()
    losses = []
    for k in range(3):
        loss = F.cross_entropy(model(normal(10 * i + k, 32, 32)), tokens(10 * i + k, 32, high=7)) / 3
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


def keep_grads_step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(normal(i, 64, 32)), tokens(i, 64, high=7))
    loss.backward()
    optimizer.step()
    return loss


def build_normed() -> nn.Module:
    """Parametrisations: weight norm, and spectral norm, which changes its buffers in forward."""
    norms = nn.utils.parametrizations
    return nn.Sequential(
        *(norms.weight_norm(nn.Linear(32, 32)), nn.Tanh(), norms.spectral_norm(nn.Linear(32, 32)), nn.GELU()),
        *(nn.LayerNorm(32), nn.BatchNorm1d(32), nn.AlphaDropout(0.1), nn.PReLU(), nn.RReLU(), nn.Linear(32, 7)),
    )


class Experts(nn.Module):
    """Tokens are sent to experts by index: shapes depend on the data, results are scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3)
        self.experts = nn.ModuleList(MLP(layers=1, out=32) for _ in range(3))
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (which == e).nonzero().squeeze(1)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return self.head(torch.relu_(out))


class Spectral(nn.Module):
    """Complex numbers: a learned filter in the frequency domain, and rotations of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(17, dtype=torch.cfloat))
        self.angle = nn.Parameter(torch.randn(16))
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(torch.tanh(x)) * self.filter
        x = torch.fft.irfft(spectrum.conj() * torch.sigmoid(spectrum.abs()), n=32)
        pairs = torch.view_as_complex(x.reshape(len(x), 16, 2)) * torch.polar(torch.ones(16), self.angle)
        return self.head(torch.view_as_real(pairs.conj().resolve_conj()).flatten(1).exp().clamp(max=3))


CASES: dict[str, Case] = {
    "lstm_lm": Case(lambda: RecurrentLM("LSTM"), language_step(8, 12), tolerance=0.02),
    "gru_lm": Case(lambda: RecurrentLM("GRU"), language_step(8, 12)),
    "decoder": Case(AttentionDecoder, simple_step(decoder_loss)),
    "nmt": Case(build_nmt, nmt_step, tolerance=0.02),
    "transformer_lm": Case(TransformerLM, language_step(4, 16)),
    "gpt2": Case(build_gpt2, simple_step(gpt2_loss)),
    "bert": Case(build_bert, simple_step(bert_loss)),
    "t5": Case(build_t5, simple_step(t5_loss)),
    "resnet": Case(build_resnet, simple_step(resnet_loss)),
    "unet": Case(UNet, simple_step(unet_loss)),
    "cnn": Case(build_cnn, classify_step(4, 3, 16, 16)),
    "speech": Case(Speech, simple_step(speech_loss)),
    "tied": Case(Tied, language_step(4, 16)),
    "frozen": Case(build_frozen, classify_step(64, 32)),
    "function": Case(WithFunction, classify_step(64, 32)),
    "unseen": Case(WithUnseenWrites, classify_step(64, 32)),
    "op": Case(WithOp, classify_step(64, 32)),
    "module_hooks": Case(build_module_hooks, classify_step(64, 32)),
    "tensor_hooks": Case(WithTensorHooks, classify_step(64, 32)),
    "retain_grad": Case(WithRetainGrad, retain_grad_step),
    "checkpoint_reentrant": Case(lambda: WithCheckpoint(True), classify_step(64, 32)),
    "checkpoint_nonreentrant": Case(lambda: WithCheckpoint(False), classify_step(64, 32)),
    "autocast": Case(TransformerLM, simple_step(autocast_loss)),
    "accumulation": Case(MLP, accumulation_step, passes=3),
    "keep_grads": Case(MLP, keep_grads_step),
    "normed": Case(build_normed, classify_step(64, 32)),
    "experts": Case(Experts, classify_step(64, 32), static=False),
    "spectral": Case(Spectral, classify_step(64, 32)),
}
