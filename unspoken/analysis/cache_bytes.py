"""What a token costs in the cache: keys and values of every entry, as decoding keeps them."""

from typing import Any

BFLOAT16 = 2  # bytes of a value


def cache_bytes_per_token(config: Any, entries: float, bytes_per_value: int = BFLOAT16) -> float:
    """Bytes of keys and values that one more token adds, while it is within every layer's window.

    config: of a latent model; entries: that a token has in every layer (`ModelFlops.cache_entries`).
    """
    text_config = config.text_config
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return 2 * heads * head_size * text_config.num_hidden_layers * bytes_per_value * entries
