"""`unspoken data show`: what a prepared folder holds, or rows to answer, and what a model will see of it."""

import argparse
import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from unspoken.data.chat_windows import ChatWindows
from unspoken.data.conversations import Example, read_examples
from unspoken.data.packing import IGNORE_LABEL, PackedDataset
from unspoken.data.tokenizer import load_existing
from unspoken.data.tokens import SPLITS, TokenShards, read_manifest
from unspoken.errors import UsageError


def main(args: argparse.Namespace) -> None:
    console = Console()
    if args.tokenizer is not None:
        print_examples(args.folder, args.tokenizer, args.sequence_length, args.num_windows, console)
        return
    if Path(args.folder).is_file():
        raise UsageError(f"{args.folder} is a file; --tokenizer MODEL shows rows to answer as that model reads them")
    print_manifest(Path(args.folder), console)
    print_windows(Path(args.folder), console, args.split, args.num_windows, args.sequence_length)


def print_examples(path: str, name: str, sequence_length: int, num_windows: int, console: Console) -> None:
    """Print the first windows of rows to answer: what is learned in green, what is asked dimmed."""
    tokenizer = load_existing(name)
    examples = read_examples([path], tokenizer, sequence_length, on_bad_line="skip")
    for note in examples.notes():
        console.print(f"note: {note}", markup=False, highlight=False)
    windows = ChatWindows(examples.rows, sequence_length, 0)
    learned = sum(int(row.is_target.sum()) for row in examples.rows)
    console.print(
        f"{len(examples.rows):,} rows, {sum(map(len, examples.rows)):,} tokens, {learned:,} of them learned; "
        f"{len(windows):,} windows of {sequence_length}, {windows.fill:.0%} full",
        highlight=False,
    )
    for index, numbers in enumerate(windows.bins[:num_windows]):
        console.rule(f"window {index}")
        for number in numbers:
            console.print(examples.rows[number].place, style="bold", markup=False, highlight=False)
            text = RichText()
            for is_learned, ids in runs(examples.rows[number]):
                text.append(str(tokenizer.decode(ids)), "green" if is_learned else "dim")
            console.print(text, soft_wrap=True)


def runs(example: Example) -> list[tuple[bool, list[int]]]:
    """The ids in stretches, those that are learned apart."""
    pairs = zip(example.is_target.tolist(), example.ids.tolist(), strict=True)
    return [(is_learned, [i for _, i in group]) for is_learned, group in itertools.groupby(pairs, lambda pair: pair[0])]


def print_manifest(folder: Path, console: Console) -> None:
    """Print documents, tokens and bytes by source and split, and where each source comes from."""
    manifest = read_manifest(folder)
    table = Table(title=str(folder), title_justify="left")
    table.add_column("source")
    table.add_column(f"documents\n{'/'.join(SPLITS)}", justify="right")
    for split in SPLITS:
        table.add_column(f"{split}\ntokens", justify="right")
    table.add_column("bytes/\ntoken", justify="right")
    for name, counts in manifest["counts"].items():
        table.add_row(name, *_cells(counts))
    table.add_section()
    table.add_row("all", *_cells(manifest["splits"]))
    console.print(table)
    for source in manifest["sources"]:
        parts = [f"{source[key]}" for key in ("package", "version", "licence", "path", "dataset") if key in source]
        parts += [f"dropped {key} {value:,}" for key, value in source["dropped"].items()]
        console.print(f"{source['name']}: {'; '.join(parts)}", highlight=False, soft_wrap=True)
    tokenizer = manifest["tokenizer"]
    console.print(
        f"tokenizer: {tokenizer['size']} ids, documents end with {tokenizer['document_end']!r}",
        highlight=False,
    )
    console.print(f"fingerprint: {manifest['fingerprint'][:16]}", highlight=False)


def print_windows(folder: Path, console: Console, split: str, num_windows: int, sequence_length: int) -> None:
    """Print the first training windows decoded, a rule between documents; text without a target is dimmed."""
    shards = TokenShards.open(folder, split)
    tokenizer = shards.load_tokenizer()
    dataset = PackedDataset(shards, sequence_length)
    for index in range(min(num_windows, len(dataset))):
        window = dataset[index]
        num_targets = int((window["labels"] != IGNORE_LABEL).sum())
        starts = [*(window["position_ids"] == 0).nonzero()[:, 0].tolist(), sequence_length]
        place = dataset.window_start(index)
        console.rule(f"window {index}: tokens {place} to {place + sequence_length - 1}, {num_targets} targets")
        for number, (begin, end) in enumerate(itertools.pairwise(starts)):
            if number:
                console.print("--- next document ---", style="dim", highlight=False)
            text = tokenizer.decode(window["input_ids"][begin:end])
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cells(counts: dict[str, dict[str, int]]) -> list[str]:
    documents = "/".join(str(counts.get(split, {}).get("documents", 0)) for split in SPLITS)
    cells = [documents, *(f"{counts.get(split, {}).get('tokens', 0):,}" for split in SPLITS)]
    tokens = sum(count["tokens"] for count in counts.values())
    size = sum(count["bytes"] for count in counts.values())
    return [*cells, f"{size / tokens:.2f}" if tokens else ""]
