"""Latent language models over any supported transformers backbone."""


def register() -> None:
    """Enter the latent models into transformers' Auto classes. Called when those are imported."""
    from transformers import AutoModel, AutoModelForCausalLM

    from unspoken.models.recycler import RecyclerForCausalLM, RecyclerModel
    from unspoken.models.vanilla import VanillaForCausalLM, VanillaModel

    for base, head in ((RecyclerModel, RecyclerForCausalLM), (VanillaModel, VanillaForCausalLM)):
        AutoModel.register(base.config_class, base, exist_ok=True)
        AutoModelForCausalLM.register(head.config_class, head, exist_ok=True)
