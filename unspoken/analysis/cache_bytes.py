"""What a token costs in the cache: keys and values of every entry, as decoding keeps them."""

from typing import Any

from unspoken.analysis.flops import ModelFlops


def cache_bytes_per_token(
    config: Any, flops: ModelFlops, latent_length: float = 0.0, bytes_per_value: int = 2
) -> float:
    """Bytes of keys and values that one more token adds, while it is within every layer's window.

    config: of a latent model; flops: its `model_flops`, which knows how many entries a token has. latent_length: mean
    latent steps of a token. bytes_per_value: 2 for bfloat16.
    """
    text_config = config.text_config
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    entries = 1 + latent_length if flops.latent else flops.decode_runs * flops.runs[-1]
    return 2 * heads * head_size * text_config.num_hidden_layers * bytes_per_value * entries
