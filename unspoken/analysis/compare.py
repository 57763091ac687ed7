"""Two evaluations of the same text: which is better, by how much, and whether the text is enough to say so.

The difference is paired: the same pieces of text are scored by both, so what makes a piece hard drops out. It says
nothing about another seed or another corpus.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from unspoken.analysis.numbers import signed
from unspoken.errors import UnspokenError
from unspoken.eval.perplexity import EXACT, interval

MIN_UNITS = 8  # with fewer no interval is given
MIN_DOCUMENTS = 10  # with fewer, drawing them anew says little: the pieces they were cut into are drawn instead

Evaluation = dict[str, Any]  # what eval.json holds


class Outcome(Enum):
    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Difference:
    """Loss of one model minus that of another in nats per token; negative is better.

    `interval` holds 95 % of the means over redrawn `unit`s (`documents` or `pieces`), None if they are too few.
    """

    mean: float
    interval: tuple[float, float] | None
    unit: str
    num_units: int

    @property
    def outcome(self) -> Outcome:
        """UNCLEAR where the interval holds zero, or there is none."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return Outcome.UNCLEAR
        return Outcome.BETTER if self.mean < 0 else Outcome.WORSE

    def __str__(self) -> str:
        if self.interval is None:
            return f"{signed(self.mean)} [too little text]"
        return f"{signed(self.mean)} [{signed(self.interval[0])}, {signed(self.interval[1])}]"


def difference(of: Evaluation, name: str, minus: Evaluation, minus_name: str) -> Difference:
    """Loss `name` (`k=2`, `exact`, ...) of one evaluation minus loss `minus_name` of another.

    Raises:
        UnspokenError: the two did not score the same pieces of text, lack that loss, or a model has diverged.
    """
    for evaluation, wanted in ((of, name), (minus, minus_name)):
        if wanted not in evaluation["rows"]["nats"]:
            raise UnspokenError(f"the evaluation of {evaluation['model']['folder']} has no {wanted!r}")
    documents, targets = np.array(of["rows"]["document"]), np.array(of["rows"]["targets"])
    same = of["data"]["fingerprint"] == minus["data"]["fingerprint"] and of["data"]["split"] == minus["data"]["split"]
    if not same or any(of["rows"][key] != minus["rows"][key] for key in ("document", "targets")):
        raise UnspokenError(
            f"{of['model']['folder']} and {minus['model']['folder']} were evaluated on different text; "
            "evaluate both with the same --data, --split, --sequence-length and --max-sequences"
        )
    nats = np.array(of["rows"]["nats"][name], float) - np.array(minus["rows"]["nats"][minus_name], float)
    if not np.isfinite(nats).all():
        worse = of if None in of["rows"]["nats"][name] else minus
        raise UnspokenError(f"{worse['model']['folder']} has a loss that is not a number: it has diverged")
    unit, sums, counts = "pieces", nats, targets
    distinct, place = np.unique(documents, return_inverse=True)
    if len(distinct) >= MIN_DOCUMENTS:
        unit, sums, counts = "documents", np.bincount(place, nats), np.bincount(place, targets)
    spread = interval(sums, counts) if len(sums) >= MIN_UNITS else None
    return Difference(float(nats.sum() / targets.sum()), spread, unit, len(sums))


def deployed(evaluation: Evaluation) -> str:
    """The loss of the model as it decodes: the exact recurrence if it was measured, else the last pass of training."""
    results = evaluation["results"]
    if EXACT in results:
        return EXACT
    num_passes = evaluation["model"]["config"].get("num_train_passes", 2)  # a default is not in a diff
    passes = {int(name[2:]): name for name in results if name[2:].isdigit()}  # not `k=1 tau=0.1`: another threshold
    return passes[max(k for k in passes if k <= num_passes)]


def verdict(equal_tokens: Difference, equal_compute: Difference, what: str = "recycling") -> str:
    """One plain sentence, decided by the two differences to the plain model."""
    tokens, compute = equal_tokens.outcome, equal_compute.outcome
    at_tokens, at_compute = f"at equal tokens ({equal_tokens})", f"at equal compute ({equal_compute})"
    if tokens is compute:
        how = {
            Outcome.BETTER: f"beat the plain model {at_tokens} and {at_compute}",
            Outcome.WORSE: f"did not win: it lost to the plain model {at_tokens} and {at_compute}",
            Outcome.UNCLEAR: f"did not win: it could not be told from the plain model {at_tokens} or {at_compute}",
        }
        return f"{what} {how[tokens]}."
    if tokens is Outcome.BETTER:
        but = "lost to it" if compute is Outcome.WORSE else "could not be told from it"
        return (
            f"{what} beat the plain model {at_tokens}, but {but} {at_compute}: it paid where text is scarce, and was "
            "not shown to pay where compute is."
        )
    verb = {Outcome.BETTER: "beat", Outcome.WORSE: "lost to", Outcome.UNCLEAR: "could not be told from"}
    return f"{what} {verb[tokens]} the plain model {at_tokens}, and {verb[compute]} it {at_compute}."
