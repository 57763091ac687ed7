"""Small real text, a tokenizer trained on it, and tiny models that read it, as folders on disk."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from tests.families import randomise
from unspoken.data.prepare import PrepareOptions, prepare
from unspoken.data.stdlib_text import stdlib_documents
from unspoken.data.tokenizer import train_bpe
from unspoken.models.convert import METHODS
from unspoken.models.latent_lm import LatentForCausalLM

VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_data(folder: Path) -> Path:
    """A prepared data folder: the standard library's help texts under a small byte-level BPE."""
    prepare(PrepareOptions(("stdlib",), f"bpe:{VOCAB_SIZE}"), folder)
    return folder


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE with a chat template whose turns end with the eos token `<|im_end|>`."""
    tokenizer = train_bpe([document.text for document in stdlib_documents()[:10]], VOCAB_SIZE - 2)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def text_model(method: str = "recycler", dtype: torch.dtype = torch.float32, **fields: Any) -> LatentForCausalLM:
    """A random two-layer llama over `VOCAB_SIZE` tokens, its adapter awake and its router telling tokens apart; `text`
    (a dict) goes to its backbone."""
    text_config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **fields.pop("text", {}),
        }
    )
    latent_class = METHODS[method]
    if "adaptive" in method:
        fields = {"exit_threshold": 0.15, "router_bias": 0.3, **fields}
    model = latent_class(latent_class.config_class(text_config=text_config, **fields))
    return randomise(model).to(dtype).eval()


def save(folder: Path, model: LatentForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
