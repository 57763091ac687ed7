"""A conversation that keeps its cache: each turn runs the tokens that are new, and the recycled state goes on.

What the cache holds is the conversation as it really went, token by token. The next turn is rendered whole by the
chat template; where that text begins with the text so far, only the rest is encoded and run:

    cache   <user> Hi <end> <assistant> Hello.
    next    <user> Hi <end> <assistant> Hello. <end> <user> How are you? <end> <assistant>
            `------------ kept ------------'  `------------------ run ------------------'

A template that changes earlier turns (drops thoughts, strips spaces) breaks that; the conversation is then read anew.
Without a template the conversation is plain text: an answer continues the message, and the next message is a new line.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.cache_utils import Cache, DynamicCache

from unspoken.decode.prompts import render
from unspoken.decode.sampling import Sampling, context_length, end_tokens, pad_token
from unspoken.errors import UnspokenError
from unspoken.models.latent_lm import LatentForCausalLM


class ChatSession:
    """Ask with `ask`, start over with `reset`.

    `messages` is the conversation, `token_ids` what the model was shown and said of it. `cache` holds these, perhaps
    without the last; it is None before the first turn and after an exception in the middle of one.
    """

    def __init__(
        self,
        model: LatentForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling | None = None,
        system: str | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.sampling = sampling or Sampling()
        self.system = system
        self.has_template = bool(tokenizer.chat_template)
        self._ends = end_tokens(model, tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.token_ids: list[int] = []
        self.cache: Cache | None = None
        self._text = ""  # what token_ids stand for

    @torch.no_grad()
    def ask(
        self,
        message: str,
        on_text: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> str:
        """Answer a message. on_text gets the answer in pieces as it comes; when should_stop says so after a token, the
        answer ends there and counts as given.

        Raises UnspokenError when the conversation fills the context or the template refuses it; it is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self._render(messages)
        ids, cache = self._continued(text)
        room = self._room(len(ids))
        self.cache = None  # until the turn is over: an exception leaves half a turn in it
        outputs = self.model.generate(  # type: ignore[operator]
            torch.tensor([ids], device=self.model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.model.device),
            cache=cache,
            streamer=_Pieces(self.tokenizer, on_text),
            stopping_criteria=StoppingCriteriaList([_Stop(should_stop)]),
            return_dict_in_generate=True,
            eos_token_id=self._ends or None,
            pad_token_id=pad_token(self.tokenizer, self._ends),
            **{**self.sampling.options(self.model), "max_new_tokens": room},
        )
        new = outputs.sequences[0, len(ids) :].tolist()
        if new[-1] in self._ends:
            new.pop()  # not in the cache, and the template's to say again
        answer = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.token_ids, self.cache, self._text = ids + new, cache, text + answer
        return answer

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self.has_template:
            return render(messages, self.tokenizer, "chat")
        return "".join("\n" * (i > 0 and m["role"] == "user") + m["content"] for i, m in enumerate(messages))

    def _continued(self, text: str) -> tuple[list[int], Cache]:
        """Token ids of the conversation up to the answer, and the cache that holds a beginning of them."""
        ids, num_kept = self._encode(text, is_start=True), len(self.token_ids)
        if not ids:
            raise UnspokenError("there is nothing to answer")
        if self.cache is not None and len(ids) > num_kept and ids[:num_kept] == self.token_ids:
            return ids, self.cache
        # A model may spell its answer in other tokens than the tokenizer would; what it really said stays.
        if self.cache is not None and len(text) > len(self._text) and text.startswith(self._text):
            return self.token_ids + self._encode(text[len(self._text) :], is_start=False), self.cache
        return ids, DynamicCache(config=self.model.config)

    def _encode(self, text: str, is_start: bool) -> list[int]:
        special = is_start and not self.has_template  # a template writes its own
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

    def _room(self, num_tokens: int) -> int:
        """Tokens that the answer may have."""
        context = context_length(self.model)
        if context is None:
            return self.sampling.max_new_tokens
        if num_tokens >= context:
            raise UnspokenError(
                f"the conversation has {num_tokens} tokens, the model's context is {context}: reset it to go on"
            )
        return min(self.sampling.max_new_tokens, context - num_tokens)


class _Pieces(TextStreamer):
    """Hands pieces of the answer on instead of printing them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


class _Stop(StoppingCriteria):
    def __init__(self, should_stop: Callable[[], bool]):
        self.should_stop = should_stop

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), self.should_stop(), dtype=torch.bool, device=input_ids.device)
