"""`unspoken data show`: what a prepared folder holds, and what a model will see of it."""

import argparse
import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unspoken.data.packing import IGNORE_LABEL, PackedDataset
from unspoken.data.tokens import SPLITS, TokenShards, read_manifest


def main(args: argparse.Namespace) -> None:
    console = Console()
    print_manifest(Path(args.folder), console)
    print_windows(Path(args.folder), console, args.split, args.num_windows, args.sequence_length)


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
