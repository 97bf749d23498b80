"""LLaMA-Factory's YAML. `packing` puts rows side by side; only `neat_packing` keeps them apart."""

from graftwork.plan.lint.facts import Configuration
from graftwork.plan.lint.read_training import TRAINING_FIELDS as TRAINING
from graftwork.plan.lint.read_training import settle
from graftwork.plan.lint.reading import Names, configure, gather, positive, text, whole, yes
from graftwork.plan.lint.written import WrittenConfig

LLAMA_FACTORY_FIELDS = {
    **TRAINING,
    "max_length": Names(("cutoff_len",), positive),
    "packing": Names(("packing", "neat_packing"), yes),
    "document_masks": Names(("neat_packing",), yes),
    "method_name": Names(("finetuning_type",), text),
    "attention": Names(("flash_attn",), text),
    "quantised": Names(("quantization_bit",), whole),
}


def read_llama_factory(written: WrittenConfig) -> Configuration:
    found = gather(written, LLAMA_FACTORY_FIELDS)
    values = found.values
    if values.pop("quantised", None) == 4:
        values["bits"] = 4
        found.places["bits"] = found.places["quantised"]
    if values.get("attention") == "fa2":
        values["attention"] = "flash_attention_2"
    settle(found)
    if values.get("method") == "lora" and "rank" not in values:
        values["rank"] = 8
    return configure(written, "llama-factory", found)
