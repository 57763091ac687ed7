"""The tokenizer of a data folder: an own byte-level BPE, the embedded default's, or any existing one."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unspoken.data import smollm2
from unspoken.data.pretrained import check_there, read_tokenizer
from unspoken.errors import UnspokenError, UsageError

DOCUMENT_END = "<|endoftext|>"
PAD = "<|pad|>"
NUM_BYTES = 256
SAMPLE_CHARS = 12_000_000  # more text changes a small vocabulary hardly at all
_BATCH_CHARS = 4_000_000


def parse_bpe_size(name: str) -> int | None:
    """Return SIZE of `bpe:SIZE`, or None for any other name; UsageError for a size that cannot be."""
    if not name.startswith("bpe:"):
        return None
    smallest = NUM_BYTES + 2
    if not name[4:].isdecimal() or int(name[4:]) < smallest:
        raise UsageError(f"--tokenizer {name}: the size must be a whole number of at least {smallest}")
    return int(name[4:])


def load_existing(name: str) -> PreTrainedTokenizerBase:
    """Load `smollm2`, a folder, or a hub name: one that can end documents.

    Raises UsageError when nothing is there, UnspokenError for what cannot be used.
    """
    if name == "smollm2":
        return smollm2.load_tokenizer()
    try:
        check_there(name, "tokenizer")
        tokenizer = read_tokenizer(name)
        document_end_id(tokenizer)
    except UnspokenError as error:
        hint = "give `bpe:SIZE`, `smollm2`, a folder or a hub name"
        raise type(error)(f"--tokenizer: {error}; {hint}") from error
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE that splits numbers into digits; ids 0 and 1 are `<|endoftext|>` and `<|pad|>`.

    bos = eos = `<|endoftext|>`. At most `SAMPLE_CHARS` of the texts are read, in order. Small texts give
    fewer ids than asked for. Equal texts give an equal tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_capped(texts, SAMPLE_CHARS), trainer)
    return _wrapped(tokenizer)


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """One token for each character of the texts, behind `<|endoftext|>` and `<|pad|>`; another character is an error.
    For a small model of its own on problems of few characters."""
    characters = sorted({character for text in texts for character in text})
    vocabulary = {token: i for i, token in enumerate([DOCUMENT_END, PAD, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=DOCUMENT_END,
        eos_token=DOCUMENT_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def document_end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that ends a document: `<|endoftext|>` if the vocabulary has it, else eos."""
    vocabulary = tokenizer.get_vocab()
    if DOCUMENT_END in vocabulary:
        return vocabulary[DOCUMENT_END]
    if tokenizer.eos_token_id is None:
        raise UnspokenError("the tokenizer has neither <|endoftext|> nor an eos token to end documents with")
    return tokenizer.eos_token_id


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield each text's ids, ending with the document end, without other special tokens.

    A special token spelled out in the text is encoded as plain characters: it must not end a document.
    """
    end = document_end_id(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    backend = Tokenizer.from_str(backend.to_str()) if backend else None
    if backend:
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
    for batch in _batches(texts, _BATCH_CHARS):
        if backend:  # the same ids as below without offsets, in two thirds of the time
            encoded = [encoding.ids for encoding in backend.encode_batch_fast(batch, add_special_tokens=False)]
        else:
            encoded = tokenizer(batch, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        yield from ([*ids, end] for ids in encoded)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a SHA-256 over everything that decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(state.encode()).hexdigest()


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return int64 [len(tokenizer)]: how many bytes of text each id of a byte-level tokenizer stands for.

    Special tokens stand for none. With it, bits per byte of any window are exact:
    sum of nats / ln 2 / sum of the targets' byte lengths. UnspokenError for a tokenizer that is not
    byte-level.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    lengths = np.zeros(len(tokenizer), dtype=np.int64)
    added = tokenizer.added_tokens_decoder
    for token, index in tokenizer.get_vocab().items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode())
            continue
        if not alphabet.issuperset(token):
            raise UnspokenError(f"token {token!r} is not byte-level, so its length in bytes is unknown")
        lengths[index] = len(token)
    return lengths


def _capped(texts: Iterable[str], num_chars: int) -> Iterator[str]:
    for text in texts:
        if num_chars <= 0:
            return
        yield text[:num_chars]
        num_chars -= len(text)


def _batches(texts: Iterable[str], num_chars: int) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= num_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
