"""Rules about what is learned: rates, adapters, rows, rewards, and what the result is for.

Input: a configuration and its context. Output: findings. Pure.
"""

import math
from collections.abc import Iterator

from graftwork.plan.lint.configuration import (
    Configuration,
    LintContext,
    RuleHit,
    count_steps,
    interval_of,
    rule,
)

RATES = {"full": (1e-6, 5e-5), "lora": (5e-5, 1e-3), "qlora": (5e-5, 1e-3), "dora": (5e-5, 1e-3)}
"""Full fine-tuning of models of billions; adapters need about ten times as much."""
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


@rule("rate-out-of-range", "warning", RATES_SOURCE)
def rate_is_out_of_range(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A rate that suits another method."""
    if config.learning_rate is None or config.method is None:
        return
    low, high = RATES[config.method]
    if context.parameters is not None and context.parameters < SMALL_MODEL:
        # Small models take more.
        high *= 4
    if low <= config.learning_rate <= high:
        return
    too = "high" if config.learning_rate > high else "low"
    effect = (
        "the loss jumps or what the model knew is lost"
        if too == "high"
        else "hardly anything is learned in a short run"
    )
    yield RuleHit(
        f"a learning rate of {config.learning_rate:g} is {too} for {config.method}",
        f"{low:g} to {high:g} is the range that is published for it; here {effect}",
        f"start from {2e-5 if config.method == 'full' else 2e-4:g}",
        ("learning_rate",),
    )


@rule("scale-is-odd", "warning", SCALES_SOURCE)
def scale_is_odd(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Alpha / rank outside what is published."""
    if config.rank is None or config.alpha is None or config.method == "full":
        return
    scale = config.alpha / (config.rank**0.5 if config.use_rslora else config.rank)
    low, high = SCALES
    if not low <= scale <= high:
        yield RuleHit(
            f"the adapter acts with alpha / rank = {config.alpha:g} / {config.rank} = {scale:.3g}",
            f"published settings are between {low:g} and {high:g}; the scale multiplies the learning rate",
            f"alpha {config.rank} to {2 * config.rank} is usual for this rank",
            ("alpha", "rank"),
        )


@rule("only-attention", "note", "LoRA primer, tinker-docs.thinkingmachines.ai, read 2026-11")
def only_attention_is_adapted(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Adapters only on attention."""
    if config.targets and config.method != "full" and set(config.targets) <= ATTENTION:
        yield RuleHit(
            "only attention layers get an adapter",
            "the MLP holds most of a model's weights; with the same number of parameters, adapters on all "
            "linear layers learn more",
            'target all linear layers (`target_modules: "all-linear"`), at a lower rank if memory is short',
            ("targets",),
        )


@rule("packing-mixes-rows", "warning", "TRL SFTConfig, 1.16")
def packing_mixes_rows(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Packing without document masks."""
    if config.packing and not config.document_masks:
        yield RuleHit(
            "rows are packed into one sequence, and nothing in the file keeps them apart",
            "unless the trainer does, each row is read with strangers in view. TRL does with its `bfd` "
            "packing and Flash Attention together; with `wrapped`, other attention or older versions it does "
            "not",
            "say it: `packing_strategy: bfd` and Flash Attention in TRL, `neat_packing` in LLaMA-Factory; "
            "graft always does",
            ("packing",),
        )


@rule("rows-are-cut", "warning")
def rows_are_cut(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Rows longer than the limit."""
    if not context.lengths or config.max_length is None:
        return
    longer = [length for length in context.lengths if length > config.max_length]
    if not longer:
        return
    # Ours leaves such rows out whole; trainers cut them at the limit.
    whole = config.kind == "graft"
    lost = sum(longer) if whole else sum(longer) - config.max_length * len(longer)
    fate, which = ("left out", "") if whole else ("cut", ", the ends of long replies first")
    ordered = sorted(context.lengths)
    covering = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    share, tokens = len(longer) / len(context.lengths), lost / sum(context.lengths)
    yield RuleHit(
        f"{share:.1%} of the rows are longer than {config.max_length} tokens and are {fate}",
        f"{tokens:.1%} of all tokens are lost{which}; the longest row has {max(context.lengths):,}",
        f"raise the limit to {covering:,} for 99 % of the rows, or split long rows by turn",
        ("max_length",),
    )


@rule("length-beyond-model", "error")
def length_is_beyond_model(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A length beyond the model's positions."""
    if context.shape is None or config.max_length is None or config.max_length <= context.shape.max_positions:
        return
    yield RuleHit(
        f"{config.max_length} tokens, but {context.shape.name} knows {context.shape.max_positions} positions",
        "positions that it never saw give noise, or an index error",
        f"at most {context.shape.max_positions}, or a base with a longer context",
        ("max_length",),
    )


@rule("ppo-is-heavy", "warning")
def ppo_is_heavy(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """PPO where memory is short."""
    if (config.algorithm or "").lower() == "ppo":
        yield RuleHit(
            "PPO keeps a value model, a reward model and a reference model in addition to the policy",
            "that is up to four models in memory; TRL took its PPO trainer out in 1.13",
            "GRPO needs no value model, and with an adapter the reference is the base itself",
            ("algorithm",),
        )


SAMPLING = frozenset({"grpo", "rloo", "ppo", "dapo", "dr_grpo", "gspo", "cispo"})
"""Algorithms that learn from sampled answers."""
LEAST_ADAPTER_RATE = 1e-5
LEAST_ANSWERS = 4
ANSWERS_FOR_DEVIATION = 8


def _samples(config: Configuration) -> bool:
    return (config.algorithm or "").lower() in SAMPLING


@rule("rl-rate-too-low", "warning", "trl#2872; LoRA Without Regret")
def rate_suits_full_weights(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A rate for full weights with an adapter."""
    rate = config.learning_rate
    if not _samples(config) or config.method in (None, "full") or rate is None or rate >= LEAST_ADAPTER_RATE:
        return
    yield RuleHit(
        f"a learning rate of {rate:g} for {config.method} with {config.algorithm}",
        "the default of TRL, 1e-6, is made for full weights: adapters learned nothing at such rates",
        "take 5e-5 to 2e-4",
        ("learning_rate", "algorithm"),
    )


@rule("rl-few-answers", "warning")
def group_is_small(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Groups of fewer than four answers."""
    if _samples(config) and config.answers is not None and config.answers < LEAST_ANSWERS:
        yield RuleHit(
            f"{config.answers} answers to a prompt",
            "the mean of so few is a poor baseline, and most groups have no difference in reward",
            "take 8 to 16 answers, and fewer prompts per step",
            ("answers",),
        )


@rule("rl-deviation-of-few", "warning", "mlx-lm-lora#50")
def deviation_of_few(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Division by the deviation of few rewards."""
    few = config.answers is not None and config.answers < ANSWERS_FOR_DEVIATION
    if _samples(config) and few and config.reward_scale in ("group", "True", "true"):
        yield RuleHit(
            f"advantages are divided by the deviation of {config.answers} rewards",
            "with few answers a deviation near zero makes advantages huge; runs ended in NaN",
            "do not divide (`scale_rewards: none`, with TRL too), or take 8 answers and more",
            ("reward_scale", "answers"),
        )


CONFIDENCE = 0.95


@rule("data-from-another-model", "warning")
def data_came_from_another(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Rows that another model wrote."""
    if config.model and config.data_model and not same_model(config.model, config.data_model):
        yield RuleHit(
            f"the rows were written by {config.data_model}, and {config.model} is trained on them",
            "this is distillation: the rate that the logs show is the other model's, and its template, "
            "reasoning and tool calls may not be this one's",
            f"measure {config.model} untrained on the held-out rows first, and compare with that",
            ("data_model", "model"),
        )


@rule("another-is-deployed", "error")
def another_is_deployed(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """An adapter for a different model than the one that is served."""
    if config.model and config.deployed_model and not same_model(config.model, config.deployed_model):
        yield RuleHit(
            f"the adapter is trained on {config.model}, but {config.deployed_model} is what is served",
            "an adapter fits the very weights that it was trained on; on others it is noise or does not load",
            "train on the model that is served, or serve the one that is trained on",
            ("deployed_model", "model"),
        )


@rule(
    "rate-cannot-be-proven", "warning", "exact binomial interval (Clopper and Pearson 1934), all cases right"
)
def rate_cannot_be_proven(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A goal that so few held-out rows cannot show."""
    if config.target_rate is None or config.test_rows is None or not 0 < config.target_rate < 1:
        return
    tail = (1 - CONFIDENCE) / 2
    best = tail ** (1 / config.test_rows)
    if best >= config.target_rate:
        return
    needed = math.ceil(math.log(tail) / math.log(config.target_rate))
    yield RuleHit(
        f"{config.test_rows} held-out rows cannot prove {config.target_rate:.1%}",
        f"with every one of them right, the exact 95 % interval still begins at {best:.1%}",
        f"hold out {needed} rows or more, or ask for {math.floor(best * 100)} %",
        ("target_rate", "test_rows"),
    )


@rule("spot-without-checkpoints", "error")
def spot_without_checkpoints(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A spot place and nothing saved."""
    if not config.spot:
        return
    steps, every = count_steps(config), interval_of(config.save_when, config.save_steps)
    never = steps is not None and every is not None and every >= steps.total
    if config.save_when == "no" or never:
        yield RuleHit(
            "the place can be taken away at any time, and no checkpoint is made before the end",
            "each interruption starts the run from nothing",
            "save every few minutes: `graft plan compare` computes the best interval for the place",
            ("save_steps", "save_when", "spot"),
        )


@rule("spot-without-mirror", "warning")
def spot_without_mirror(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A spot place and checkpoints on its disk."""
    if config.spot and config.mirror is None:
        yield RuleHit(
            "the place can be taken away at any time, and checkpoints stay on its own disk",
            "with the machine its disk can go, and the checkpoints with it",
            "copy them out as they are made (`train.run.mirror: s3://…` in graft.yaml)",
            ("spot",),
        )


@rule("deadline-comes-first", "error")
def deadline_comes_first(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A session shorter than the run."""
    if config.deadline_minutes is None or config.expected_minutes is None:
        return
    if config.expected_minutes > config.deadline_minutes:
        source = "as stated" if "expected_minutes" in config.places else "or more, as estimated"
        yield RuleHit(
            f"the run takes {_hours(config.expected_minutes)} {source}, and the place is gone after "
            f"{_hours(config.deadline_minutes)}",
            "it needs several sessions: each ends with a checkpoint and begins with it, or starts over",
            "resume from a mirror in the next session, train on fewer rows, or take a longer session",
            ("deadline_minutes", "expected_minutes"),
        )


@rule("placeholder", "error")
def template_was_not_filled_in(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A value of a template."""
    for key, value in config.unfilled.items():
        yield RuleHit(
            f"{key} still holds the placeholder {value!r}",
            "it is used as it is, and fails when it is first used, maybe at the end of the run",
            "fill it in, or remove it",
            (f"={key}",),
        )


@rule("number-as-text", "warning")
def number_is_text(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """2e-4, which YAML 1.1 reads as a text."""
    for key, value in config.texts_for_numbers.items():
        mantissa, exponent = value.lower().split("e")
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        sign = exponent if exponent[0] in "+-" else f"+{exponent}"
        yield RuleHit(
            f"{key}: {value} is a text to YAML 1.1, not a number",
            "PyYAML wants a point and a sign; a script that does not convert it fails when it compares",
            f"write {mantissa}e{sign}",
            (f"={key}",),
        )


def same_model(first: str, second: str) -> bool:
    """By the last part of the name: an organization before it, case and underscores do not matter."""

    def plain(name: str) -> str:
        return name.rstrip("/").split("/")[-1].lower().replace("_", "-")

    return plain(first) == plain(second)


def _hours(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"
