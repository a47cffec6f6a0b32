"""Train a small translation model: LSTM encoder, attention decoder with input feeding, greedy decoding, BLEU."""

import argparse
import contextlib
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import sacrebleu
import torch
import torch.nn.functional as F
from sentencepiece import SentencePieceProcessor
from torch import nn

# isort: split
import data
from model import Seq2Seq

# Options which may change when a run is resumed; all others come from the checkpoint.
FREE = {"data", "epochs", "max_steps", "out", "resume", "log_every", "log_json", "eval_lines", "threads", "device"}
BLEU_TOKENIZERS = {"zh_Hans": "zh", "zh_Hant": "zh", "ja": "char", "th": "char", "km": "char", "my": "char"}


def parse_args() -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """The options, and the checkpoint to go on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE.tsv", help="own text, source<TAB>target per line, instead of the catalogs")
    add("--lang", default="vi", help="target language of Django's message catalogs; several as a,b,c; or 'all'")
    add("--epochs", type=int, default=40)
    add("--max-steps", type=int, default=0, help="stop after this many steps (0: no limit)")
    add("--batch-size", type=int, default=64)
    add("--length", type=int, default=0, metavar="N", help="join pairs and cut them so that every batch is N long")
    add("--hidden", type=int, default=256)
    add("--embed", type=int, default=256)
    add("--dropout", type=float, default=0.2)
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=1)
    add("--vocab-size", type=int, default=2000, help="subwords, about")
    add("--out", type=Path, metavar="DIR", help="write subwords.model and checkpoint.pt here")
    add("--resume", type=Path, metavar="FILE", help="go on from this checkpoint, with its options")
    add("--log-every", type=int, default=20, metavar="STEPS")
    add("--log-json", type=Path, metavar="FILE", help="write one JSON line per step")
    add("--eval-lines", type=int, default=200, help="held-out lines to translate after each epoch (0: none)")
    add("--threads", type=int, default=0, help="CPU threads (0: PyTorch's choice)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    checkpoint = None
    if args.resume:
        try:
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
            parser.set_defaults(**checkpoint["args"])
        except OSError as error:
            raise data.DataError(f"cannot read {args.resume}: {error.strerror}") from error
        except Exception as error:
            raise data.DataError(f"{args.resume} is not a checkpoint of this script") from error
        args = parser.parse_args()
        for name, value in checkpoint["args"].items():
            if name not in FREE and getattr(args, name) != value:
                option = name.replace("_", "-")
                raise data.DataError(f"--{option} {getattr(args, name)}, but {args.resume} was made with {value}")
    for name in ("epochs", "batch_size", "hidden", "embed", "vocab_size", "log_every"):
        if getattr(args, name) < 1:
            raise data.DataError(f"--{name.replace('_', '-')} must be at least 1")
    if args.length == 1 or args.length < 0:
        raise data.DataError("--length must be at least 2 (or 0: lengths of the text)")
    if not 0 <= args.dropout < 1:
        raise data.DataError("--dropout must be at least 0 and less than 1")
    return args, checkpoint


def evaluate(
    model: Seq2Seq, subwords: SentencePieceProcessor, pairs: list[data.Pair], args: argparse.Namespace
) -> tuple[float | None, list[str]]:
    """Corpus BLEU of greedy translations (None if there are no lines), and the translations."""
    if not pairs:
        return None, []
    model.eval()
    rows: list[data.Row] = [(subwords.encode(pair.source)[: data.MAX_LENGTH], []) for pair in pairs]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    hypotheses = [""] * len(rows)
    for start in range(0, len(order), args.batch_size):
        chunk = order[start : start + args.batch_size]
        batch = data.collate([rows[i] for i in chunk])
        tokens = model.greedy(batch.src.to(args.device), batch.src_lengths, max_length=2 * batch.src.size(1))
        for i, text in zip(chunk, subwords.decode(tokens), strict=True):
            hypotheses[i] = text
    model.train()
    tokenizer = "13a" if args.data else BLEU_TOKENIZERS.get(args.lang, "13a")
    score = sacrebleu.corpus_bleu(hypotheses, [[pair.tgt for pair in pairs]], tokenize=tokenizer)
    return score.score, hypotheses


def params_sha256(model: nn.Module) -> str:
    """A hash of all the parameters' bytes."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, never leaving half of one."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


def train(args: argparse.Namespace, checkpoint: dict[str, Any] | None, log: TextIO | None) -> None:
    """Train, evaluate after each epoch, save."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    langs = args.lang.split(",")
    pairs = data.tsv_pairs(args.data) if args.data else data.catalog_pairs(langs)
    train_pairs, held_out = data.split(pairs)
    subword_model = checkpoint["subwords"] if checkpoint else data.train_subwords(train_pairs, args.vocab_size)
    subwords = SentencePieceProcessor(model_proto=subword_model)
    rows = data.encode(train_pairs, subwords)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "subwords.model").write_bytes(subword_model)

    model = Seq2Seq(subwords.vocab_size(), args.embed, args.hidden, args.dropout).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step, first_epoch, skip = 0, 0, 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        if checkpoint["cuda_rng"] and args.device != "cpu":
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"])
        step, first_epoch, skip = checkpoint["step"], checkpoint["epoch"], checkpoint["batch"]
    print(
        f"{len(train_pairs)} training pairs, {len(held_out)} held out, {subwords.vocab_size()} subwords, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )

    recent: list[tuple[float, float]] = []  # loss and seconds of the steps since the last line of the log
    hypotheses: list[str] = []
    bleu: float | None = None
    for epoch in range(first_epoch, args.epochs):
        if args.max_steps and step >= args.max_steps:
            break
        rng = random.Random(f"{args.seed}-{epoch}")
        if args.length:
            batches = data.fixed_length(rows, args.batch_size, args.length, rng)
        else:
            batches = data.bucketed(rows, args.batch_size, rng)
        stop = min(len(batches), skip + args.max_steps - step) if args.max_steps else len(batches)
        for batch in batches[skip:stop]:
            start = time.perf_counter()
            src, tgt_in, tgt_out = (ids.to(args.device) for ids in (batch.src, batch.tgt_in, batch.tgt_out))
            optimizer.zero_grad()
            logits = model(src, batch.src_lengths, tgt_in)
            loss = F.cross_entropy(logits.flatten(0, 1), tgt_out.flatten(), ignore_index=data.PAD)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            value = float(loss.item())
            elapsed = time.perf_counter() - start
            step += 1
            recent.append((value, elapsed))
            if log:
                sizes = {"src_len": src.size(1), "tgt_len": tgt_out.size(1)}
                log.write(json.dumps({"step": step, "loss": value.hex(), "seconds": round(elapsed, 6), **sizes}) + "\n")
            if step % args.log_every == 0:
                mean_loss, mean_seconds = (sum(column) / len(recent) for column in zip(*recent, strict=True))
                print(
                    f"step {step:5}  epoch {epoch + 1:3}  loss {mean_loss:6.3f}  {mean_seconds:.3f} s/step", flush=True
                )
                recent.clear()
        epoch, skip = (epoch + 1, 0) if stop == len(batches) else (epoch, stop)
        bleu, hypotheses = evaluate(model, subwords, held_out[: args.eval_lines], args)
        if bleu is not None:
            print(f"step {step:5}  epochs done {epoch}  BLEU {bleu:.1f}", flush=True)
        if args.out:
            content = {
                "args": {name: value for name, value in vars(args).items() if name not in FREE},
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
                "subwords": subword_model,
                "step": step,
                "epoch": epoch,
                "batch": skip,
            }
            save(args.out / "checkpoint.pt", content)

    if bleu is None:
        bleu, hypotheses = evaluate(model, subwords, held_out[: args.eval_lines], args)
    for pair, hypothesis in list(zip(held_out, hypotheses, strict=False))[:3]:
        print(f"  source: {pair.source}\n  wanted: {pair.tgt}\n  got:    {hypothesis}")
    if log:
        log.write(json.dumps({"bleu": bleu, "params_sha256": params_sha256(model)}) + "\n")


def main() -> int:
    """Run; errors of the user's making are one line and exit code 2."""
    try:
        args, checkpoint = parse_args()
        with contextlib.ExitStack() as stack:
            log = None
            if args.log_json:
                log = stack.enter_context(args.log_json.open("a" if checkpoint else "w", buffering=1))
            train(args, checkpoint, log)
    except (data.DataError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
