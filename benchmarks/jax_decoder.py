"""The workload `decoder` in JAX, plain and with ``jax.checkpoint``.

``python benchmarks/jax_decoder.py``, in an environment of its own that has jax (torch is not needed).

Peaks are XLA's own figures for the compiled step (temporaries and gradients, above parameters and inputs), times medians of
interleaved steps on one thread, as ratios to the plain one's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp

BATCH, LENGTH, SOURCE, WIDTH, VOCABULARY = 32, 20, 50, 256, 2000

Parameters = dict[str, jax.Array]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def parameters(key: jax.Array) -> Parameters:
    """As `benchmarks/workloads/decoder.py` has them."""
    w = WIDTH
    shapes = {
        "embedding": (VOCABULARY, w), "w_ih": (2 * w, 4 * w), "w_hh": (w, 4 * w), "b": (4 * w,), "query": (w, w), "key": (w, w),
        "score": (w,), "output": (2 * w, VOCABULARY), "bias": (VOCABULARY,),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def attend(p: Parameters, h: jax.Array, keys: jax.Array, memory: jax.Array) -> jax.Array:
    """The context for a query."""
    scores = jnp.tanh((h @ p["query"])[:, None] + keys) @ p["score"]
    return jnp.einsum("bs,bsw->bw", jax.nn.softmax(scores), memory)


def step(attention: Callable[..., Any], p: Parameters, carry: Any, x: jax.Array, keys: Any, memory: Any) -> Any:
    """One target position."""
    h, c, context = carry
    gates = jnp.concatenate([x, context], -1) @ p["w_ih"] + h @ p["w_hh"] + p["b"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, c, attention(p, h, keys, memory)


def loss(p: Parameters, memory: jax.Array, target: jax.Array, *, scan: bool, of_step: Wrap, of_attention: Wrap) -> Any:
    """The mean of the squares of the logits."""
    one = of_step(functools.partial(step, of_attention(attend)))
    keys, embedded = memory @ p["key"], p["embedding"][target]
    carry = (jnp.zeros((BATCH, WIDTH)),) * 3

    def logits(carry: Any) -> jax.Array:
        return jnp.concatenate([carry[0], carry[2]], -1) @ p["output"] + p["bias"]

    if scan:

        def body(carry: Any, x: jax.Array) -> Any:
            carry = one(p, carry, x, keys, memory)
            return carry, logits(carry)

        _, out = jax.lax.scan(body, carry, embedded.swapaxes(0, 1))
        return jnp.mean(jnp.square(out))
    outs = []
    for t in range(LENGTH):
        carry = one(p, carry, embedded[:, t], keys, memory)
        outs.append(logits(carry))
    return jnp.mean(jnp.square(jnp.stack(outs, 1)))


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """No checkpointing."""
    return function


VARIANTS: dict[str, dict[str, Any]] = {
    f"{name}{', scan' if scan else ''}": {"scan": scan, **wraps}
    for scan in (False, True)
    for name, wraps in {
        "plain": {"of_step": plain, "of_attention": plain},
        "jax.checkpoint, attention": {"of_step": plain, "of_attention": jax.checkpoint},
        "jax.checkpoint, step": {"of_step": jax.checkpoint, "of_attention": plain},
    }.items()
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures here")
    args = parser.parse_args()
    key = jax.random.key(0)
    given = (
        parameters(key),
        jax.random.normal(key, (BATCH, SOURCE, WIDTH)),
        jax.random.randint(key, (BATCH, LENGTH), 0, VOCABULARY),
    )
    compiled = {}
    for name, options in VARIANTS.items():
        compiled[name] = jax.jit(jax.grad(functools.partial(loss, **options))).lower(*given).compile()
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(args.rounds + 1):
        for name, function in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(function(*given))
            seconds[name].append(time.perf_counter() - begin)
    records = []
    for name, function in compiled.items():
        memory = function.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
        ratio = statistics.median(a / b for a, b in list(zip(seconds[name], seconds["plain"], strict=True))[1:])
        records.append(
            {"variant": name, "peak_bytes": peak, "seconds": statistics.median(seconds[name]), "ratio": ratio}
        )
        print(f"{name:34s} {peak / 2**20:8.1f} MiB  {1e3 * records[-1]['seconds']:8.1f} ms  {ratio:.2f}x")
    if args.out is not None:
        args.out.write_text(json.dumps({"jax": jax.__version__, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
