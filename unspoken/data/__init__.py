"""Text in, training windows out: reading, cleaning, splitting, tokenising, packing; the embedded default's files."""
