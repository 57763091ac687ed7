"""Questions that held-out text answers by itself: its last words, how its passages go on, and the text as it is.

cloze     the last word of a passage, in the style of LAMBADA. What asks of people there that they cannot guess it
          from its sentence alone, asks here that it stands in an earlier sentence and not in its own, that it is no
          common word, and that it follows the word before it nowhere in the training text
choice    which sentence goes on after a passage; the other three, of like length, stand elsewhere
text      documents, to be scored whole
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspoken.data.prose import passages
from unspoken.data.tokens import TokenShards

MIN_CONTEXT_WORDS, MIN_CONTEXT_SENTENCES = 40, 2
MIN_CHOICE_WORDS = 5  # of a sentence that is offered
NUM_COMMON = 200  # words that are no answer
NUM_CHOICES, NUM_LIKE_LENGTH = 4, 40
MAX_TEXT_CHARS = 4000
WORD, ANSWER = re.compile(r"[A-Za-z]+"), re.compile(r"[A-Za-z]{4,}")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Passage:
    """Sentences of one document: the context, and the last one."""

    context: str
    last: str


@dataclass(frozen=True)
class KnownWords:
    """What a model can have learned of words without reading a passage: the common ones, and pairs of neighbours."""

    common: frozenset[str]
    pairs: Counter[tuple[str, str]]

    @classmethod
    def of(cls, texts: Iterable[str]) -> "KnownWords":
        counts, pairs = Counter[str](), Counter[tuple[str, str]]()
        for text in texts:
            words = [word.lower() for word in WORD.findall(text)]
            counts.update(words)
            pairs.update(itertools.pairwise(words))
        return cls(frozenset(word for word, _ in counts.most_common(NUM_COMMON)), pairs)


def documents(folder: str | Path, split: str, max_tokens: int | None = None) -> list[str]:
    """Texts of a prepared folder's split, in its order, as far as `max_tokens` reach."""
    shards = TokenShards.open(folder, split)
    tokenizer = shards.load_tokenizer()
    texts: list[str] = []
    num_tokens = 0
    for index in range(shards.num_documents):
        ids = shards.document(index)
        num_tokens += len(ids)
        if max_tokens is not None and num_tokens > max_tokens and texts:
            break
        texts.append(tokenizer.decode(ids[:-1].tolist()))
    return texts


def passages_of(texts: Iterable[str]) -> list[Passage]:
    """Every sentence that has enough in front of it, with the fewest sentences that are enough."""
    found = []
    for stretch in (stretch for text in texts for stretch in passages(text)):
        lengths = [len(sentence.split()) for sentence in stretch]
        for place, sentence in enumerate(stretch):
            begin = place - MIN_CONTEXT_SENTENCES
            while begin > 0 and sum(lengths[begin:place]) < MIN_CONTEXT_WORDS:
                begin -= 1
            if begin >= 0 and sum(lengths[begin:place]) >= MIN_CONTEXT_WORDS:
                found.append(Passage(" ".join(stretch[begin:place]), sentence))
    return found


def cloze(texts: Iterable[str], known: KnownWords, num: int, seed: int, are_known: bool = False) -> Rows:
    """Rows of `text`, whose last word is the answer. are_known: the texts are those that the pairs were counted in."""
    rows = []
    for passage in passages_of(texts):
        words = WORD.findall(passage.last)
        if len(words) < 2 or not ANSWER.fullmatch(words[-1]):
            continue
        *before, answer = (word.lower() for word in words)
        is_guessed = answer in known.common or known.pairs[before[-1], answer] > are_known
        if not is_guessed and answer not in before and answer in map(str.lower, WORD.findall(passage.context)):
            end = passage.last.rindex(words[-1]) + len(words[-1])
            rows.append({"text": f"{passage.context} {passage.last[:end]}"})
    return _drawn(rows, num, seed)


def choices(texts: Iterable[str], num: int, seed: int) -> Rows:
    """Rows of `context`, `choices` and the `label` of the right one. Fewer than four sentences give none."""
    found = [passage for passage in passages_of(texts) if len(passage.last.split()) >= MIN_CHOICE_WORDS]
    sentences = sorted({passage.last for passage in found})
    rows = []
    for passage in _drawn(found, num, seed):
        draw = random.Random(f"{seed} {passage.context}")
        others = draw.sample(sentences, min(NUM_LIKE_LENGTH, len(sentences)))
        others = [other for other in others if other != passage.last and other not in passage.context]
        others.sort(key=lambda sentence: abs(len(sentence) - len(passage.last)))
        offered = [passage.last, *others[: NUM_CHOICES - 1]]
        draw.shuffle(offered)
        if len(offered) == NUM_CHOICES:
            rows.append({"context": passage.context, "choices": offered, "label": offered.index(passage.last)})
    return rows


def whole_texts(texts: Iterable[str], num: int, seed: int) -> Rows:
    """Rows of `text`: the documents' beginnings, up to the end of a line."""
    rows = []
    for text in texts:
        end = len(text) if len(text) <= MAX_TEXT_CHARS else text.rfind("\n", 0, MAX_TEXT_CHARS) + 1 or MAX_TEXT_CHARS
        rows.append({"text": text[:end]})
    return _drawn(rows, num, seed)


def _drawn(rows: list, num: int, seed: int) -> list:
    """At most `num` of the rows, in their order."""
    if len(rows) <= num:
        return rows
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), num))]
