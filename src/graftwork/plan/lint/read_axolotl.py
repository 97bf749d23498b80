"""Axolotl's YAML. Its sample packing keeps rows apart by itself, so it counts as masked."""

from graftwork.plan.lint.facts import Configuration
from graftwork.plan.lint.read_training import TRAINING_FIELDS as TRAINING
from graftwork.plan.lint.read_training import settle
from graftwork.plan.lint.reading import Names, configure, gather, number, positive, text, whole, yes
from graftwork.plan.lint.written import WrittenConfig

AXOLOTL_FIELDS = {
    **TRAINING,
    "model": Names(("base_model",), text),
    "micro_batch": Names(("micro_batch_size",), positive),
    "epochs": Names(("num_epochs",), number),
    "max_length": Names(("sequence_len",), positive),
    "packing": Names(("sample_packing",), yes),
    "method_name": Names(("adapter",), text),
    "patience": Names(("early_stopping_patience",), whole),
    "saves_per_epoch": Names(("saves_per_epoch",), positive),
    "evals_per_epoch": Names(("evals_per_epoch",), positive),
}


def read_axolotl(written: WrittenConfig) -> Configuration:
    found = gather(written, AXOLOTL_FIELDS)
    values = found.values
    for field, when in (("saves_per_epoch", "save_when"), ("evals_per_epoch", "eval_when")):
        if values.pop(field, None) is not None:
            values[when] = "epoch"
            found.places[when] = found.places[field]
    values["document_masks"] = True
    settle(found)
    if values.get("method") is None:
        # Without an adapter all of the weights are trained.
        values["method"] = "full"
    return configure(written, "axolotl", found)
