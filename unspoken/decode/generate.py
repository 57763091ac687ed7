"""`unspoken generate`: continue prompts in left-padded batches, in order, as JSON lines.

A row out is the row in with `completions` and `usage` added. A completion has `text`, `num_tokens` (the end token
counts) and `finish_reason` (`stop`: an end token came, `length`: the limit did). The usage counts `num_prompt_tokens`,
`num_new_tokens` (of all completions) and `num_latent_steps`, runs of the backbone beyond one for each token: those of
the prompt, once, and of every new token that was taken in again (the last one is not); with beams, of all beams.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from unspoken.data.cache import check_file
from unspoken.data.pauses import pause_id
from unspoken.decode.prompts import Request, batches, encode, read_requests, requests_of
from unspoken.decode.sampling import Sampling, context_length, end_tokens, pad_token, require_tokenizer
from unspoken.errors import UnspokenError, UsageError
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_model

INTERRUPTED = 130


def main(args: argparse.Namespace) -> int:
    sampling = Sampling.from_args(args)
    _check(args)
    requests = read_requests(args.input) if args.input else requests_of(args.prompt)
    if args.stream and len(requests) != 1:
        raise UsageError(f"--stream shows one prompt as it is continued; there are {len(requests)}")
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    writer = BatchWriter(
        model,
        require_tokenizer(tokenizer, args.model),
        sampling,
        args.num_beams,
        args.num_return_sequences,
        args.num_pauses,
    )
    prompts = [writer.encode(request, args.chat) for request in requests]
    torch.manual_seed(args.seed)
    num_done = 0
    with _output(args.output) as file, _progress(args.output is not None, len(requests)) as advance:
        try:
            for batch in batches(list(zip(requests, prompts)), args.batch_size):
                streamer = TextStreamer(writer.tokenizer, skip_prompt=True, skip_special_tokens=True)
                answers = writer.complete([ids for _, ids in batch], streamer if args.stream else None)
                for (request, _), answer in zip(batch, answers):
                    if args.output or not args.stream:
                        file.write(json.dumps({**request.row, **answer}, ensure_ascii=False) + "\n")
                file.flush()
                num_done += len(batch)
                advance(len(batch))
        except KeyboardInterrupt:
            where = f" are in {args.output}" if args.output else " were written"
            print(f"unspoken: interrupted: {num_done} of {len(requests)} rows{where}", file=sys.stderr)
            return INTERRUPTED
    return 0


class BatchWriter:
    """A model that continues batches of prompts of any lengths. with_ids: a completion has its tokens too, `ids`, up to
    the end token."""

    def __init__(
        self,
        model: LatentForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        num_pauses: int = 0,
        with_ids: bool = False,
    ):
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.ends = end_tokens(model, tokenizer)
        self.num_return_sequences, self.with_ids = num_return_sequences, with_ids
        self.pauses = pauses(tokenizer, num_pauses)
        self.options = {
            **sampling.options(model),
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
            "eos_token_id": self.ends or None,
            "pad_token_id": pad_token(tokenizer, self.ends),
        }

    def encode(self, request: Request, chat: bool = False) -> list[int]:
        """Token ids of a request. Raises UnspokenError for one that leaves no room in the model's context."""
        ids = encode(request, self.tokenizer, self.model.config.vocab_size, chat) + self.pauses
        context, wanted = context_length(self.model), self.sampling.max_new_tokens
        if context is None or len(ids) + wanted <= context:
            return ids
        if len(ids) >= context:
            raise UnspokenError(f"{request.place}: the prompt has {len(ids)} tokens, the model's context is {context}")
        raise UnspokenError(
            f"{request.place}: the prompt has {len(ids)} tokens and --max-new-tokens is {wanted}, together more than "
            f"the model's context of {context}; --max-new-tokens {context - len(ids)} would fit"
        )

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], streamer: TextStreamer | None = None) -> list[dict[str, Any]]:
        """Of each prompt the `completions`, `num_return_sequences` of them, and the `usage`."""
        ids, mask = self._left_padded(prompts)
        with latent_lengths(self.model) as lengths:
            outputs: Any = self.model.generate(ids, attention_mask=mask, streamer=streamer, **self.options)
        new = outputs[:, ids.shape[1] :].tolist()
        completions = [self._completion(row) for row in new]
        answers = []
        for number, (prompt, own) in enumerate(zip(prompts, batches(completions, self.num_return_sequences))):
            num_tokens = [completion["num_tokens"] for completion in own]
            usage = {
                "num_prompt_tokens": len(prompt),
                "num_new_tokens": sum(num_tokens),
                "num_latent_steps": self._latent_steps(lengths, number, ids.shape, num_tokens),
            }
            answers.append({"completions": own, "usage": usage})
        return answers

    def _latent_steps(self, lengths: list[Tensor], number: int, shape: tuple[int, ...], num_tokens: list[int]) -> int:
        """Of one prompt of the batch and its new tokens. lengths: of each forward, [rows, tokens]."""
        if not lengths:
            return 0
        num_prompts, width = shape
        all_lengths = torch.cat(lengths, dim=1)
        num_rows = len(all_lengths) // num_prompts  # one for each text, or beam
        rows = all_lengths[number * num_rows : (number + 1) * num_rows]
        new = rows[:, width:]
        if self.options["num_beams"] == 1:  # what follows a text's end is none of it
            taken_in = torch.tensor(num_tokens, device=new.device).unsqueeze(-1) - 1
            new = new.masked_fill(torch.arange(new.shape[1], device=new.device) >= taken_in, 0)
        return int(rows[0, :width].sum() + new.sum())

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The mask is explicit: a pad may be an ordinary token, or one that the prompt contains."""
        rows = [torch.tensor(ids) for ids in prompts]
        pad = self.options["pad_token_id"]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        ones = [torch.ones_like(row) for row in rows]
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side="left")
        return ids.to(self.model.device), mask.to(self.model.device)

    def _completion(self, ids: list[int]) -> dict[str, Any]:
        end = next((place for place, token in enumerate(ids) if token in self.ends), None)
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        num_tokens = len(ids) if end is None else end + 1
        completion = {"text": text, "num_tokens": num_tokens, "finish_reason": "length" if end is None else "stop"}
        return completion | ({"ids": ids[:num_tokens]} if self.with_ids else {})


def pauses(tokenizer: PreTrainedTokenizerBase, number: int) -> list[int]:
    """What a prompt ends with: so many pause tokens.

    Raises:
        UsageError: less than none, or the tokenizer has no pause.
    """
    if number < 0:
        raise UsageError(f"--num-pauses is {number}; it must be at least 0")
    found = pause_id(tokenizer)
    if number and found is None:
        raise UsageError("--num-pauses: the model was not trained with pause tokens (data.pause_fraction)")
    return [found] * number if found is not None else []


@contextmanager
def latent_lengths(model: LatentForCausalLM) -> Iterator[list[Tensor]]:
    """The latent steps of each token that the model takes in meanwhile: [rows, tokens] of each forward (and of its last
    pass); nothing from a model without latent steps."""
    found: list[Tensor] = []

    def note(module, args, output) -> None:
        if output.latents is not None:
            found.append(output.latents.lengths)

    hook = model.model.register_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def _check(args: argparse.Namespace) -> None:
    for name in ("batch_size", "num_beams", "num_return_sequences"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    wanted, beams = args.num_return_sequences, args.num_beams
    if wanted > 1 and args.temperature == 0 and wanted > beams:
        raise UsageError(
            f"--num-return-sequences {wanted}: greedy text is always the same; give --temperature above 0, "
            f"or --num-beams {wanted} or more"
        )
    if wanted > beams > 1:
        raise UsageError(f"--num-return-sequences {wanted} is more than --num-beams {beams}")
    if args.stream and (wanted > 1 or beams > 1):
        raise UsageError("--stream shows one text as it comes; not with --num-beams or --num-return-sequences")
    if args.output:
        check_file("--output", args.output)


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
    else:
        with open(path, "w", encoding="utf-8") as file:
            yield file


@contextmanager
def _progress(shown: bool, total: int):
    """Yields a function that advances the bar; there is none when the rows themselves are shown."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("", total=total)
        yield lambda rows: progress.advance(task, rows)
