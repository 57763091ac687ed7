"""`unspoken data validate`: every row that `data prepare` could not use, by file, line and reason."""

import argparse
from collections import Counter
from dataclasses import dataclass, field

from unspoken.data.rows import BadRow, Row, find_files, read_rows


@dataclass
class Report:
    """What `validate` found: all bad rows in order, the number of good ones, and notices that are no errors."""

    num_files: int = 0
    num_good: int = 0
    bad: list[BadRow] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Bad rows by kind."""
        return Counter(row.kind for row in self.bad)


def validate(names: list[str], text_field: str = "text", max_document_chars: int = 1_000_000) -> Report:
    """Read all rows of the files and folders as `data prepare` would. Raises UsageError for paths that cannot be."""
    report = Report()
    for path in find_files(names):
        report.num_files += 1
        for row in read_rows(path, text_field):
            if isinstance(row, BadRow):
                report.bad.append(row)
                continue
            report.num_good += 1
            if len(row.text) > max_document_chars:
                report.notices.append(_long_notice(row, max_document_chars))
    return report


def main(args: argparse.Namespace) -> int:
    """Print the bad rows to stdout; exit status 0 if none, or if they may be skipped and good rows are left."""
    report = validate(args.files, args.text_field, args.max_document_chars)
    for row in report.bad:
        print(row)
    for notice in report.notices:
        print(f"note: {notice}")
    print(f"{report.num_good} good and {len(report.bad)} bad rows in {_files(report.num_files)}")
    for kind, count in sorted(report.counts.items()):
        print(f"  {kind}: {count}")
    if not report.bad:
        return 0
    if args.on_bad_line == "skip":
        print("--on-bad-line skip: the bad rows would be left out")
        return 0 if report.num_good else 1
    return 1


def _long_notice(row: Row, max_chars: int) -> str:
    return f"{row.path}:{row.line}: {len(row.text):,} characters; `data prepare` cuts at {max_chars:,}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"
