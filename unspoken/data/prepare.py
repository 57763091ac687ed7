"""`unspoken data prepare`: corpora -> clean documents -> splits -> tokenizer -> shards and manifest.

Documents pass through a spool file, so that memory holds one source at a time and one entry per document. The
output folder appears when all is done, or not at all.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from unspoken.data.cache import check_folder, whole_folder
from unspoken.data.clean import Deduplicator
from unspoken.data.corpus import CorpusOptions, Stream, check_corpus, open_corpus, source_names
from unspoken.data.documents import Document
from unspoken.data.show import print_manifest
from unspoken.data.split import MIN_DOCUMENTS, Placed, cut_in_three, cut_long, fill_small_splits, hashed_split
from unspoken.data.tokenizer import (
    DOCUMENT_END,
    document_end_id,
    encode_documents,
    load_existing,
    parse_bpe_size,
    tokenizer_fingerprint,
    train_bpe,
)
from unspoken.data.tokens import FORMAT, MANIFEST, SPLITS, shards_fingerprint, token_dtype, write_split
from unspoken.errors import UnspokenError, UsageError

_SPOOL = "spool.jsonl"


@dataclass(frozen=True)
class PrepareOptions:
    """What decides the content of a prepared folder; see `unspoken data prepare --help`."""

    corpora: tuple[str, ...]
    tokenizer: str = "bpe:4096"
    text_field: str = "text"
    on_bad_line: str = "error"
    max_document_chars: int = 1_000_000
    seed: int = 0


def main(args: argparse.Namespace) -> None:
    options = PrepareOptions(
        tuple(args.corpus),
        args.tokenizer,
        args.text_field,
        args.on_bad_line,
        args.max_document_chars,
        args.seed,
    )
    prepare(options, Path(args.out), overwrite=args.overwrite, console=Console(stderr=True))
    print_manifest(Path(args.out), Console())


def prepare(options: PrepareOptions, out: Path, overwrite: bool = False, console: Console | None = None) -> dict:
    """Write a prepared folder to `out` and return its manifest.

    Equal inputs, options and package versions give equal shards. Raises UsageError for bad options or an
    `out` that exists, UnspokenError for bad rows, a failed download, or no text at all.
    """
    if out.exists():
        if not overwrite:
            raise UsageError(f"{out} exists; --overwrite replaces it")
        if not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
            raise UsageError(f"{out} is no prepared data folder and will not be replaced; give another --out")
    check_folder("--out", out.absolute().parent)
    if options.max_document_chars < 1:
        raise UsageError(f"--max-document-chars is {options.max_document_chars}; it must be at least 1")
    for corpus in options.corpora:
        check_corpus(corpus)
    bpe_size = parse_bpe_size(options.tokenizer)
    console = console or Console(quiet=True)
    existing = None if bpe_size else load_existing(options.tokenizer)
    with whole_folder(out, replace=overwrite) as folder, _progress(console) as progress:
        spool = _Spool(folder / _SPOOL)
        sources = _collect(options, spool, progress)
        notices = _place(spool, progress)
        order = _shuffled_order(spool.documents, options.seed)
        tokenizer = existing or _train_tokenizer(spool, order, bpe_size or 0, progress)
        tokenizer.save_pretrained(folder / "tokenizer")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "unspoken": version("unspoken"),
            "options": vars(options) | {"corpora": [*options.corpora]},
        }
        manifest |= _write_shards(folder, spool, order, tokenizer, sources, progress)
        manifest["notices"] = [*spool.notices, *notices]
        spool.path.unlink()
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for notice in manifest["notices"]:
        console.print(f"note: {notice}", highlight=False)
    return manifest


@dataclass
class _Spool:
    """The cleaned documents on disk, one JSON line each, with an entry in memory for each."""

    path: Path
    documents: list[Placed] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def write(self, documents: Iterable[tuple[Document, str, bool]]) -> None:
        """Append (document, split, whether a rule chose the split)."""
        with self.path.open("ab") as file:
            for document, split, by_rule in documents:
                self.offsets.append(file.tell())
                file.write(json.dumps(document.text).encode() + b"\n")
                size = len(document.text.encode())
                self.documents.append(Placed(document.source, document.id, size, split, by_rule))

    def texts(self, indices: Iterable[int]) -> Iterator[str]:
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self.offsets[index])
                yield json.loads(file.readline())


def _collect(options: PrepareOptions, spool: _Spool, progress: Progress) -> list[dict]:
    """Read all corpora into the spool; return the manifest's entry for each source."""
    deduplicator = Deduplicator()
    corpus_options = CorpusOptions(options.text_field, options.on_bad_line)
    names = [name for corpus in options.corpora for name in source_names(corpus)]
    task = progress.add_task("reading", total=len(names), what=names[0])
    entries: list[dict] = []
    for corpus in dict.fromkeys(options.corpora):
        for stream in open_corpus(corpus, deduplicator, corpus_options):
            progress.update(task, what=stream.name)
            if any(entry["name"] == stream.name for entry in entries):
                continue  # `--corpus core --corpus full`
            spool.write(_unique(stream, deduplicator, options.max_document_chars, spool.notices))
            entries.append({"name": stream.name, **stream.described(), "dropped": dict(sorted(stream.dropped.items()))})
            following = names[len(entries)] if len(entries) < len(names) else ""
            progress.update(task, advance=1, what=following)
    progress.update(task, completed=len(names), what=f"{len(spool.documents)} documents")
    if not spool.documents:
        counts = sum((Counter(entry["dropped"]) for entry in entries), Counter[str]())
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no rows"
        raise UnspokenError(f"no text is left in {', '.join(options.corpora)} ({reasons})")
    return entries


def _unique(
    stream: Stream, deduplicator: Deduplicator, max_chars: int, notices: list[str]
) -> Iterator[tuple[Document, str, bool]]:
    """Yield a stream's documents with their split, without empty and repeated ones, long ones in pieces."""
    num_long = 0
    for document in stream.documents:
        if not document.text.strip():
            stream.dropped["empty_document"] += 1
        elif not deduplicator.is_new_document(document.text):
            stream.dropped["duplicate_document"] += 1
        else:
            rule = stream.held_out.get(document.id) or ("train" if stream.held_out else None)
            split = rule or hashed_split(document.source, document.id)
            pieces = cut_long(document.text, max_chars)
            num_long += len(pieces) > 1
            for number, piece in enumerate(pieces):
                id = document.id if len(pieces) == 1 else f"{document.id}#{number}"
                yield Document(document.source, id, piece), split, rule is not None or len(pieces) > 1
    if num_long:
        notices.append(f"{stream.name}: {num_long} documents longer than {max_chars} characters were cut into pieces")


def _place(spool: _Spool, progress: Progress) -> list[str]:
    """See to it that val and test are not empty; return notices."""
    if len(spool.documents) < MIN_DOCUMENTS:
        whole = [
            Document(placed.source, placed.id, text)
            for placed, text in zip(spool.documents, spool.texts(range(len(spool.documents))))
        ]
        spool.documents.clear()
        spool.offsets.clear()
        spool.write((part, split, True) for document in whole for part, split in cut_in_three(document))
        return ["fewer than three documents: each was cut, its last 2 percent test, the 2 before them val"]
    moved = fill_small_splits(spool.documents)
    return [f"val or test were small by hash: {moved} documents were moved to them"] if moved else []


def _shuffled_order(documents: list[Placed], seed: int) -> dict[str, list[int]]:
    """Return for each split its documents' numbers, sources mixed."""
    order: dict[str, list[int]] = {split: [] for split in SPLITS}
    for index, document in enumerate(documents):
        order[document.split].append(index)
    for split, indices in order.items():
        random.Random(f"{seed} {split}").shuffle(indices)
    return order


def _train_tokenizer(
    spool: _Spool, order: dict[str, list[int]], size: int, progress: Progress
) -> PreTrainedTokenizerBase:
    task = progress.add_task("tokenizer", total=1, what=f"byte-level BPE, {size} ids")
    tokenizer = train_bpe(spool.texts(order["train"]), size)
    if len(tokenizer) < size:
        spool.notices.append(f"the text gave a vocabulary of {len(tokenizer)} ids, not {size}")
    progress.update(task, completed=1)
    return tokenizer


def _write_shards(
    folder: Path,
    spool: _Spool,
    order: dict[str, list[int]],
    tokenizer: PreTrainedTokenizerBase,
    sources: list[dict],
    progress: Progress,
) -> dict:
    """Tokenise every split and return the rest of the manifest."""
    dtype = token_dtype(len(tokenizer))
    task = progress.add_task("tokens", total=len(spool.documents), what="")
    counts: dict[tuple[str, str], Counter[str]] = {}

    def encoded(split: str) -> Iterator[tuple[list[int], int]]:
        all_ids = encode_documents(tokenizer, spool.texts(order[split]))
        for index, ids in zip(order[split], all_ids, strict=True):
            placed = spool.documents[index]
            count = counts.setdefault((placed.source, split), Counter())
            count.update(documents=1, tokens=len(ids), bytes=placed.num_bytes)
            progress.update(task, advance=1, what=split)
            yield ids, placed.num_bytes

    splits = {split: write_split(folder, split, encoded(split), dtype) for split in SPLITS}
    progress.update(task, what=f"{sum(count['tokens'] for count in splits.values()):,}")
    return {
        "dtype": dtype.str,
        "splits": splits,
        "sources": sources,
        "counts": {
            source: {split: dict(count) for (name, split), count in sorted(counts.items()) if name == source}
            for source in dict.fromkeys(name for name, _ in counts)
        },
        "tokenizer": {
            "size": len(tokenizer),
            "document_end": tokenizer.convert_ids_to_tokens(document_end_id(tokenizer)) or DOCUMENT_END,
            "document_end_id": document_end_id(tokenizer),
            "fingerprint": tokenizer_fingerprint(tokenizer),
        },
        "fingerprint": shards_fingerprint(folder),
    }


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
    )
