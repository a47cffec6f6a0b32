"""Parallel text, subwords and batches for the translation example."""

import hashlib
import importlib.util
import io
import random
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import polib
import sentencepiece
import torch
from torch import Tensor

PAD, UNK, BOS, EOS = range(4)
BUCKET = 8  # batches are padded to a multiple of this length
MAX_LENGTH = 120  # longer training pairs are left out

Row = tuple[list[int], list[int]]


class DataError(Exception):
    """The data asked for is missing or unusable; the message is one line for the user."""


class Pair(NamedTuple):
    """A source line and its translation; `tag` names the language to write where there are several."""

    src: str
    tgt: str
    tag: str = ""

    @property
    def source(self) -> str:
        """What the model reads."""
        return f"{self.tag} {self.src}".lstrip()


class Batch(NamedTuple):
    """Token ids of one batch, and the true lengths of its source rows (on the CPU)."""

    src: Tensor
    src_lengths: Tensor
    tgt_in: Tensor
    tgt_out: Tensor


def _catalogs() -> dict[str, list[Path]]:
    """Message catalogs of the installed Django by language: each .po, or the .mo where there is no .po."""
    spec = importlib.util.find_spec("django")
    if spec is None or spec.origin is None:
        raise DataError("the default text comes from Django, which is not installed: pip install django, or use --data")
    found: dict[str, list[Path]] = {}
    for file in sorted(Path(spec.origin).parent.rglob("locale/*/LC_MESSAGES/*.[pm]o")):
        lang = file.parts[-3]
        if (file.suffix == ".po" or not file.with_suffix(".po").exists()) and not lang.startswith("en"):
            found.setdefault(lang, []).append(file)
    return found


def _clean(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def catalog_pairs(langs: Sequence[str]) -> list[Pair]:
    """English to `langs` (or to "all") from Django's catalogs."""
    catalogs = _catalogs()
    if list(langs) == ["all"]:
        langs = sorted(catalogs)
    if unknown := [lang for lang in langs if lang not in catalogs]:
        raise DataError(f"no catalog for language {unknown[0]!r}; there are: {' '.join(sorted(catalogs))}")
    pairs: dict[Pair, None] = {}
    for lang in langs:
        tag = f"<2{lang}>" if len(langs) > 1 else ""
        for file in catalogs[lang]:
            for entry in polib.pofile(str(file)) if file.suffix == ".po" else polib.mofile(str(file)):
                if entry.obsolete or entry.fuzzy or entry.msgid_plural:
                    continue
                src, tgt = _clean(entry.msgid), _clean(entry.msgstr)
                if tgt and src != tgt and any(map(str.isalpha, src)):
                    pairs[Pair(src, tgt, tag)] = None
    return list(pairs)


def tsv_pairs(path: Path) -> list[Pair]:
    """The user's own text: one `source<TAB>target` per line, UTF-8."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text") from error
    pairs: dict[Pair, None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 2:
            raise DataError(f"{path}:{number}: expected source<TAB>target, found {len(fields)} fields")
        src, tgt = map(_clean, fields)
        if src and tgt:
            pairs[Pair(src, tgt)] = None
    return list(pairs)


def split(pairs: Sequence[Pair], most: int = 1000) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs: a tenth of the sources (at most `most`), chosen by hash, is held out."""

    def rank(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    sources = sorted({pair.src for pair in pairs}, key=rank)
    held = set(sources[: min(most, len(sources) // 10)])
    if not held:
        raise DataError(f"too little text: {len(sources)} different source lines, at least 10 are needed")
    train = [pair for pair in pairs if pair.src not in held]
    return train, sorted((pair for pair in pairs if pair.src in held), key=lambda pair: rank("\t".join(pair)))


def train_subwords(pairs: Sequence[Pair], vocab_size: int) -> bytes:
    """A sentencepiece model of both languages together, of about `vocab_size` pieces (fewer if the text is small)."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text for pair in pairs for text in (pair.src, pair.tgt)),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            user_defined_symbols=sorted({pair.tag for pair in pairs} - {""}),
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"cannot build a subword vocabulary of {vocab_size}: {' '.join(str(error).split())}") from error
    return model.getvalue()


def encode(pairs: Sequence[Pair], subwords: sentencepiece.SentencePieceProcessor) -> list[Row]:
    """Subword ids of the pairs which are not too long, without BOS and EOS."""
    rows = [(subwords.encode(pair.source), subwords.encode(pair.tgt)) for pair in pairs]
    rows = [row for row in rows if max(map(len, row)) < MAX_LENGTH]
    if not rows:
        raise DataError(f"no training pair is shorter than {MAX_LENGTH} subwords")
    return rows


def collate(rows: Sequence[Row], multiple: int = BUCKET) -> Batch:
    """Pad the rows (EOS added) to the next multiple of `multiple`."""

    def pad(sequences: list[list[int]]) -> Tensor:
        width = -(-max(map(len, sequences)) // multiple) * multiple
        return torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sequences])

    tgt = pad([[*tgt, EOS] for _, tgt in rows])
    return Batch(
        src=pad([[*src, EOS] for src, _ in rows]),
        src_lengths=torch.tensor([len(src) + 1 for src, _ in rows]),
        tgt_in=torch.cat([torch.full_like(tgt[:, :1], BOS), tgt[:, :-1]], dim=1),
        tgt_out=tgt,
    )


def bucketed(rows: Sequence[Row], batch_size: int, rng: random.Random) -> list[Batch]:
    """Batches of rows of similar length, in random order."""
    rows = rng.sample(rows, len(rows))
    rows.sort(key=lambda row: (len(row[1]) // BUCKET, len(row[0]) // BUCKET))
    batches = [collate(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    rng.shuffle(batches)
    return batches


def fixed_length(rows: Sequence[Row], batch_size: int, length: int, rng: random.Random) -> list[Batch]:
    """Full batches `length` subwords long on both sides: pairs are joined until they are long enough, then cut.

    There are as many batches as the rows would make unjoined; the text is reshuffled and reused as needed.
    """

    def joined() -> Iterator[Row]:
        src: list[int] = []
        tgt: list[int] = []
        while True:
            for more_src, more_tgt in rng.sample(rows, len(rows)):
                src, tgt = src + more_src, tgt + more_tgt
                if min(len(src), len(tgt)) >= length - 1:
                    yield src[: length - 1], tgt[: length - 1]
                    src, tgt = [], []

    stream = joined()
    return [collate(list(islice(stream, batch_size)), multiple=1) for _ in range(0, len(rows), batch_size)]
