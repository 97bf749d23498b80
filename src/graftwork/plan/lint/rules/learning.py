"""Rules about what is learned: rates, adapters, lengths, packing. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.facts import Around, Configuration
from graftwork.plan.lint.rule import LintRule, RuleResult

RATES = {"full": (1e-6, 5e-5), "lora": (5e-5, 1e-3), "qlora": (5e-5, 1e-3), "dora": (5e-5, 1e-3)}
"""Full fine-tuning of models of billions; adapters want about ten times as much."""
RATES_SOURCE = (
    "QLoRA, arXiv 2305.14314 (1e-4 to 2e-4); LoRA Without Regret, Thinking Machines 2025 (ten times full); "
    "Llama 2, arXiv 2307.09288 (full: 2e-5)"
)
SMALL_MODEL = 1e9
SCALES = (0.25, 8.0)
SCALES_SOURCE = "published ends: QLoRA 16 / 64, LoRA on GPT-2 32 / 4 (arXiv 2305.14314, 2106.09685)"
ATTENTION = {
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "c_attn",
    "query_key_value",
    "Wqkv",
    "att_proj",
}


def rate_is_out_of_range(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if said.learning_rate is None or said.method is None:
        return
    low, high = RATES[said.method]
    if around.parameters is not None and around.parameters < SMALL_MODEL:
        # Small models take more.
        high *= 4
    if low <= said.learning_rate <= high:
        return
    too = "high" if said.learning_rate > high else "low"
    effect = (
        "the loss jumps or what the model knew is lost"
        if too == "high"
        else "hardly anything is learned in a short run"
    )
    yield RuleResult(
        f"a learning rate of {said.learning_rate:g} is {too} for {said.method}",
        f"{low:g} to {high:g} is the range that is published for it; here {effect}",
        f"start from {2e-5 if said.method == 'full' else 2e-4:g}",
        ("learning_rate",),
    )


def scale_is_odd(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.rank is None or said.alpha is None or said.method == "full":
        return
    scale = said.alpha / (said.rank**0.5 if said.stabilised else said.rank)
    low, high = SCALES
    if not low <= scale <= high:
        yield RuleResult(
            f"the adapter acts with alpha / rank = {said.alpha:g} / {said.rank} = {scale:.3g}",
            f"published settings lie between {low:g} and {high:g}; the scale multiplies the learning rate",
            f"alpha {said.rank} to {2 * said.rank} is usual for this rank",
            ("alpha", "rank"),
        )


def only_attention_is_adapted(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.targets and said.method != "full" and set(said.targets) <= ATTENTION:
        yield RuleResult(
            "only attention layers get an adapter",
            "the MLP holds most of a model's weights; with the same number of parameters, adapters on all "
            "linear layers learn more",
            'target all linear layers (`target_modules: "all-linear"`), at a lower rank if memory is short',
            ("targets",),
        )


def packing_mixes_rows(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.packing and not said.document_masks:
        yield RuleResult(
            "rows are packed into one sequence, and nothing in the file keeps them apart",
            "unless the trainer does, each row is read with strangers in view. TRL does with its `bfd` "
            "packing and Flash Attention together; with `wrapped`, other attention or older versions it does "
            "not",
            "say it: `packing_strategy: bfd` and Flash Attention in TRL, `neat_packing` in LLaMA-Factory; "
            "graft always does",
            ("packing",),
        )


def rows_are_cut(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if not around.lengths or said.max_length is None:
        return
    longer = [length for length in around.lengths if length > said.max_length]
    if not longer:
        return
    # Ours leaves such rows out whole; trainers cut them at the limit.
    whole = said.kind == "graft"
    lost = sum(longer) if whole else sum(longer) - said.max_length * len(longer)
    fate, which = ("left out", "") if whole else ("cut", ", the ends of long replies first")
    share, tokens = len(longer) / len(around.lengths), lost / sum(around.lengths)
    yield RuleResult(
        f"{share:.1%} of the rows are longer than {said.max_length} tokens and are {fate}",
        f"{tokens:.1%} of all tokens are lost{which}; the longest row has {max(around.lengths):,}",
        f"raise the limit to {_covering(around.lengths):,} for 99 % of the rows, or split long rows by turn",
        ("max_length",),
    )


def length_is_beyond_model(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if around.shape is None or said.max_length is None or said.max_length <= around.shape.max_positions:
        return
    yield RuleResult(
        f"{said.max_length} tokens, but {around.shape.name} knows {around.shape.max_positions} positions",
        "positions that it never saw give noise, or an index error",
        f"at most {around.shape.max_positions}, or a base with a longer context",
        ("max_length",),
    )


def ppo_is_heavy(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if (said.algorithm or "").lower() == "ppo":
        yield RuleResult(
            "PPO keeps a value model, a reward model and a reference beside the policy",
            "that is up to four models in memory; TRL took its PPO trainer out in 1.13",
            "GRPO needs no value model, and with an adapter the reference is the base itself",
            ("algorithm",),
        )


def _covering(lengths: tuple[int, ...]) -> int:
    ordered = sorted(lengths)
    return ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]


LEARNING_RULES = (
    LintRule(
        "rate-out-of-range", "warning", "a rate that suits another method", rate_is_out_of_range, RATES_SOURCE
    ),
    LintRule(
        "scale-is-odd", "warning", "alpha / rank outside what is published", scale_is_odd, SCALES_SOURCE
    ),
    LintRule(
        "only-attention",
        "note",
        "adapters on attention alone",
        only_attention_is_adapted,
        "LoRA primer, tinker-docs.thinkingmachines.ai, read 2026-11",
    ),
    LintRule(
        "packing-mixes-rows",
        "warning",
        "packing without document masks",
        packing_mixes_rows,
        "TRL SFTConfig, 1.16",
    ),
    LintRule("rows-are-cut", "warning", "rows longer than the limit", rows_are_cut),
    LintRule("length-beyond-model", "error", "a length beyond the model's positions", length_is_beyond_model),
    LintRule("ppo-is-heavy", "warning", "PPO where memory is short", ppo_is_heavy),
)
