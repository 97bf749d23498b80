"""Rules about training: steps and schedules, batches, what is learned, rewards, and runs that end early.

In: a configuration and its context. Out: findings. Pure.
"""

from collections.abc import Iterator

from graftwork.plan.lint.facts import (
    Configuration,
    LintContext,
    LintRule,
    RuleHit,
    count_steps,
    effective_batch,
    interval_of,
    warmup_of,
)

SAMPLING = frozenset({"grpo", "rloo", "ppo", "dapo", "dr_grpo", "gspo", "cispo"})
"""Algorithms that learn from sampled answers."""
LEAST_ADAPTER_RATE = 1e-5
LEAST_ANSWERS = 4
ANSWERS_FOR_DEVIATION = 8


def _samples(config: Configuration) -> bool:
    return (config.algorithm or "").lower() in SAMPLING


def rate_suits_full_weights(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    rate = config.learning_rate
    if not _samples(config) or config.method in (None, "full") or rate is None or rate >= LEAST_ADAPTER_RATE:
        return
    yield RuleHit(
        f"a learning rate of {rate:g} for {config.method} with {config.algorithm}",
        "the default of TRL, 1e-6, is made for full weights: adapters learned nothing at such rates",
        "take 5e-5 to 2e-4",
        ("learning_rate", "algorithm"),
    )


def group_is_small(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if _samples(config) and config.answers is not None and config.answers < LEAST_ANSWERS:
        yield RuleHit(
            f"{config.answers} answers to a prompt",
            "the mean of so few is a poor baseline, and most groups have no difference in reward",
            "take 8 to 16 answers, and fewer prompts a step",
            ("answers",),
        )


def deviation_of_few(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    few = config.answers is not None and config.answers < ANSWERS_FOR_DEVIATION
    if _samples(config) and few and config.reward_scale in ("group", "True", "true"):
        yield RuleHit(
            f"advantages are divided by the deviation of {config.answers} rewards",
            "with few answers a deviation near zero makes advantages huge; runs ended in NaN",
            "do not divide (`policy.scale: none`; TRL: scale_rewards none), or take 8 answers and more",
            ("reward_scale", "answers"),
        )


REWARD_RULES = (
    LintRule(
        "rl-rate-too-low",
        "warning",
        "a rate for full weights with an adapter",
        rate_suits_full_weights,
        "trl#2872; LoRA Without Regret",
    ),
    LintRule("rl-few-answers", "warning", "groups of fewer than four answers", group_is_small),
    LintRule(
        "rl-deviation-of-few",
        "warning",
        "division by the deviation of few rewards",
        deviation_of_few,
        "mlx-lm-lora#50",
    ),
)


def batch_is_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    batch = effective_batch(config)
    if config.micro_batch is None or config.stated_batch is None or config.stated_batch == batch:
        return
    yield RuleHit(
        f"the effective batch is {_product(config)} = {batch}, not {config.stated_batch}",
        "the learning rate, the steps of an epoch and the comparison with earlier runs hang on it",
        _fix_accumulation(config, config.stated_batch),
        ("stated_batch", "accumulation", "micro_batch"),
    )


def batch_contradicts_itself(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.kind != "deepspeed" or None in (config.batch, config.micro_batch, config.accumulation):
        return
    assert config.batch is not None
    each = (config.micro_batch or 1) * (config.accumulation or 1)
    if config.cards is None and config.batch % each == 0:
        return
    if config.batch == each * (config.cards or 1):
        return
    yield RuleHit(
        f"train_batch_size is {config.batch}, but {_product(config)} = {each * (config.cards or 1)}",
        "DeepSpeed refuses to start unless they agree for the cards that are there",
        _fix_accumulation(config, config.batch),
        ("batch", "accumulation"),
    )


def batch_does_not_divide(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    cards, batch = config.cards or 1, config.batch or config.stated_batch
    if cards < 2 or batch is None or batch % cards == 0:
        return
    yield RuleHit(
        f"{batch} rows a step do not divide by {cards} cards",
        "some cards get a row more than others and the rest wait for them in every step",
        f"take {batch // cards * cards or cards} or {(batch // cards + 1) * cards} rows a step",
        ("batch", "stated_batch", "cards"),
    )


def batch_is_larger_than_the_data(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    batch = effective_batch(config)
    if config.rows is not None and batch is not None and batch > config.rows:
        yield RuleHit(
            f"{batch} rows a step, but there are {config.rows}",
            "every epoch is one smaller step, and rates for the batch that is set do not fit it",
            f"at most {max(config.rows // 10, 1)} rows a step gives ten steps an epoch",
            ("stated_batch", "batch", "accumulation", "micro_batch"),
        )


def max_steps_win(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps = count_steps(config.model_copy(update={"max_steps": None}))
    if config.max_steps is None or config.epochs is None or config.kind == "deepspeed":
        return
    if steps is not None and steps.total == config.max_steps:
        return
    by_epochs = f"; {config.epochs:g} epochs would be {steps.total} steps" if steps else ""
    yield RuleHit(
        f"max_steps {config.max_steps} is set, so the {config.epochs:g} epochs are ignored",
        f"transformers uses the steps where both are set{by_epochs}",
        "keep one of the two",
        ("max_steps",),
    )


def epoch_steps_are_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps = count_steps(config)
    stated = config.stated_epoch_steps
    if steps is None or steps.epoch is None or stated is None or abs(stated - steps.epoch) <= 1:
        return
    yield RuleHit(
        f"an epoch has {steps.epoch} steps, not {stated}",
        f"{config.rows} rows / {effective_batch(config)} rows a step; warm-up, intervals and hours assume "
        f"{stated / steps.epoch:.1f} times as many",
        f"expect {steps.epoch} steps an epoch",
        ("stated_epoch_steps",),
    )


def steps_are_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps, stated = count_steps(config), config.stated_steps
    if steps is None or stated is None or abs(stated - steps.total) <= max(1, 0.05 * steps.total):
        return
    yield RuleHit(
        f"the run has {steps.total} steps, not {stated}",
        "whatever was set in steps (warm-up, checkpoints, evaluations) was set for another run",
        f"set it for {steps.total} steps",
        ("stated_steps",),
    )


def _product(config: Configuration) -> str:
    cards = f" × {config.cards} cards" if config.cards else ""
    return f"{config.micro_batch} × {config.accumulation or 1}{cards}"


def _fix_accumulation(config: Configuration, wanted: int) -> str:
    each = (config.micro_batch or 1) * (config.cards or 1)
    if wanted % each == 0:
        return f"accumulate {wanted // each} times for {wanted}, or say {effective_batch(config)}"
    near = max(round(wanted / each), 1)
    return (
        f"{wanted} cannot be made of {each} rows at a time; {near * each} can, by accumulating {near} times"
    )


BATCH_RULES = (
    LintRule(
        "batch-not-as-stated",
        "error",
        "a batch that is not micro × accumulation × cards",
        batch_is_not_as_stated,
    ),
    LintRule(
        "batch-contradicts-itself",
        "error",
        "DeepSpeed's three batch figures that do not agree",
        batch_contradicts_itself,
        "DeepSpeed configuration, batch size related parameters",
    ),
    LintRule(
        "batch-larger-than-data",
        "warning",
        "a step of more rows than there are",
        batch_is_larger_than_the_data,
    ),
    LintRule("max-steps-win", "note", "epochs that steps overrule", max_steps_win),
    LintRule(
        "batch-does-not-divide", "warning", "rows that cards cannot share evenly", batch_does_not_divide
    ),
    LintRule(
        "epoch-steps-not-as-stated",
        "error",
        "a wrong number of steps per epoch",
        epoch_steps_are_not_as_stated,
    ),
    LintRule("steps-not-as-stated", "error", "a wrong number of steps of the run", steps_are_not_as_stated),
)


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


def rate_is_out_of_range(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def scale_is_odd(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.rank is None or config.alpha is None or config.method == "full":
        return
    scale = config.alpha / (config.rank**0.5 if config.stabilised else config.rank)
    low, high = SCALES
    if not low <= scale <= high:
        yield RuleHit(
            f"the adapter acts with alpha / rank = {config.alpha:g} / {config.rank} = {scale:.3g}",
            f"published settings are between {low:g} and {high:g}; the scale multiplies the learning rate",
            f"alpha {config.rank} to {2 * config.rank} is usual for this rank",
            ("alpha", "rank"),
        )


def only_attention_is_adapted(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.targets and config.method != "full" and set(config.targets) <= ATTENTION:
        yield RuleHit(
            "only attention layers get an adapter",
            "the MLP holds most of a model's weights; with the same number of parameters, adapters on all "
            "linear layers learn more",
            'target all linear layers (`target_modules: "all-linear"`), at a lower rank if memory is short',
            ("targets",),
        )


def packing_mixes_rows(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
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


def rows_are_cut(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    if not context.lengths or config.max_length is None:
        return
    longer = [length for length in context.lengths if length > config.max_length]
    if not longer:
        return
    # Ours leaves such rows out whole; trainers cut them at the limit.
    whole = config.kind == "graft"
    lost = sum(longer) if whole else sum(longer) - config.max_length * len(longer)
    fate, which = ("left out", "") if whole else ("cut", ", the ends of long replies first")
    share, tokens = len(longer) / len(context.lengths), lost / sum(context.lengths)
    yield RuleHit(
        f"{share:.1%} of the rows are longer than {config.max_length} tokens and are {fate}",
        f"{tokens:.1%} of all tokens are lost{which}; the longest row has {max(context.lengths):,}",
        f"raise the limit to {_covering(context.lengths):,} for 99 % of the rows, or split long rows by turn",
        ("max_length",),
    )


def length_is_beyond_model(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    if context.shape is None or config.max_length is None or config.max_length <= context.shape.max_positions:
        return
    yield RuleHit(
        f"{config.max_length} tokens, but {context.shape.name} knows {context.shape.max_positions} positions",
        "positions that it never saw give noise, or an index error",
        f"at most {context.shape.max_positions}, or a base with a longer context",
        ("max_length",),
    )


def ppo_is_heavy(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if (config.algorithm or "").lower() == "ppo":
        yield RuleHit(
            "PPO keeps a value model, a reward model and a reference besides the policy",
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


LARGE_WARMUP = 0.2
FEW_STEPS = 100
TRAINER = "transformers TrainingArguments and EarlyStoppingCallback, 5.22"
ASKS_FOR_EVALUATION = ("training", "llama-factory")
"""Kinds where an interval alone switches no evaluation on."""


def warmup_outlasts_run(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps = count_steps(config)
    warmup = warmup_of(config, steps.total) if steps else None
    if steps is None or warmup is None or warmup < steps.total:
        return
    reached = steps.total / warmup
    yield RuleHit(
        f"the warm-up of {warmup} steps is as long as the run of {steps.total} or longer",
        f"the rate rises to {reached:.0%} of what is set and never falls: the schedule does not happen",
        f"warm up for {max(round(steps.total * 0.05), 1)} to {max(round(steps.total * 0.1), 1)} steps",
        ("warmup_steps", "warmup_share"),
    )


def warmup_large_share(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps = count_steps(config)
    warmup = warmup_of(config, steps.total) if steps else None
    if steps is None or warmup is None or not LARGE_WARMUP * steps.total < warmup < steps.total:
        return
    yield RuleHit(
        f"the warm-up takes {warmup} of {steps.total} steps ({warmup / steps.total:.0%})",
        "that much of the run is trained at a lower rate than is set",
        f"3 to 10 % is usual: {max(round(steps.total * 0.05), 1)} steps here",
        ("warmup_steps", "warmup_share"),
    )


def checkpoint_never_comes(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps, every = count_steps(config), interval_of(config.save_when, config.save_steps)
    if steps is None or every is None or every < steps.total:
        return
    if config.kind == "graft" and "save_steps" not in config.places:
        # Our own interval, on a run so short that little is lost.
        return
    end = "only the last step is saved" if config.kind != "deepspeed" else "nothing is saved"
    yield RuleHit(
        f"a checkpoint every {every} steps, but the run has {steps.total}",
        f"{end}: whatever ends the run before that loses all of it",
        f"save every {max(steps.total // 5, 1)} steps or more often",
        ("save_steps", "save_when"),
    )


def saving_is_off(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.save_when == "no":
        yield RuleHit(
            "no checkpoint is ever written",
            "a crash, a full disk or a closed session loses the whole run",
            "save by steps, and resume from the last checkpoint",
            ("save_when",),
        )


def evaluation_never_happens(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps, every = count_steps(config), interval_of(config.eval_when, config.eval_steps)
    if steps is None or every is None or every < steps.total:
        return
    yield RuleHit(
        f"an evaluation every {every} steps, but the run has {steps.total}",
        "at most the end is measured: there is no curve to stop by and no best model to choose",
        f"evaluate every {max(steps.total // 5, 1)} steps",
        ("eval_steps", "eval_when"),
    )


def evaluation_not_switched_on(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.kind in ASKS_FOR_EVALUATION and config.eval_steps and config.eval_when in (None, "no"):
        yield RuleHit(
            f"an interval of {config.eval_steps} steps is set, but evaluation is not switched on",
            "the strategy is `no` unless it is set; the interval alone does nothing",
            "set `eval_strategy: steps`",
            ("eval_steps",),
        )


def stop_without_evaluation(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.stops_early and not _evaluates(config):
        yield RuleHit(
            "early stopping is set, but nothing is evaluated during the run",
            "there is no figure to stop by; transformers refuses to start so",
            "set `eval_strategy: steps` and an interval well below the length of the run",
            ("stops_early",),
        )


def stop_without_metric(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    foreign = config.kind != "graft"
    if (
        foreign
        and config.stops_early
        and _evaluates(config)
        and config.best_metric is None
        and not config.keep_best
    ):
        yield RuleHit(
            "early stopping is set, but no metric to stop by",
            "the callback asserts `metric_for_best_model`, which is `loss` only with load_best_model_at_end",
            "set `metric_for_best_model: eval_loss` and `load_best_model_at_end: true`",
            ("stops_early",),
        )


def best_without_evaluation(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.keep_best and not _evaluates(config):
        yield RuleHit(
            "the best model is to be loaded at the end, but nothing is evaluated",
            "no checkpoint has a figure to be the best by; transformers refuses to start so",
            "set `eval_strategy` as `save_strategy` is set",
            ("keep_best",),
        )


def best_off_the_grid(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if not config.keep_best or not _evaluates(config) or config.save_when == "best":
        return
    saved, evaluated = config.save_when or "steps", config.eval_when or "steps"
    if saved != evaluated:
        yield RuleHit(
            f"the best model is to be loaded, but it is saved by {saved} and evaluated by {evaluated}",
            "the model that was best is not the one that was saved",
            "use the same strategy for both",
            ("save_when", "eval_when", "keep_best"),
        )
    elif (
        saved == "steps" and config.save_steps and config.eval_steps and config.save_steps % config.eval_steps
    ):
        yield RuleHit(
            f"checkpoints every {config.save_steps} steps are not on the grid of evaluations "
            f"every {config.eval_steps}",
            "a checkpoint without a figure cannot be the best one; transformers refuses to start so",
            f"save every {config.eval_steps} steps or a multiple of it, or evaluate as often as is saved",
            ("save_steps", "eval_steps"),
        )


def few_steps(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    steps = count_steps(config)
    if steps is not None and config.max_steps is None and steps.total < FEW_STEPS:
        yield RuleHit(
            f"the run has {steps.total} updates in all",
            "that few leave little room to learn; intervals made for long runs do not fit it",
            "a smaller batch gives more updates of the same rows; set all intervals for this length",
            ("epochs", "rows"),
        )


def _evaluates(config: Configuration) -> bool:
    if config.kind in ASKS_FOR_EVALUATION:
        return config.eval_when not in (None, "no")
    return config.eval_when not in (None, "no") or config.eval_steps is not None


SCHEDULE_RULES = (
    LintRule("warmup-outlasts-run", "error", "a warm-up as long as the run", warmup_outlasts_run),
    LintRule("warmup-large-share", "warning", "a warm-up of more than a fifth", warmup_large_share),
    LintRule("checkpoint-never-comes", "error", "an interval longer than the run", checkpoint_never_comes),
    LintRule("saving-is-off", "warning", "a run that saves nothing", saving_is_off),
    LintRule(
        "evaluation-never-happens",
        "error",
        "an evaluation interval longer than the run",
        evaluation_never_happens,
    ),
    LintRule(
        "evaluation-not-switched-on",
        "error",
        "an interval whose strategy is `no`",
        evaluation_not_switched_on,
        TRAINER,
    ),
    LintRule(
        "stop-without-evaluation",
        "error",
        "early stopping that sees no figure",
        stop_without_evaluation,
        TRAINER,
    ),
    LintRule("stop-without-metric", "error", "early stopping without a metric", stop_without_metric, TRAINER),
    LintRule(
        "best-without-evaluation",
        "error",
        "a best model that nothing measures",
        best_without_evaluation,
        TRAINER,
    ),
    LintRule("best-off-the-grid", "error", "checkpoints between two evaluations", best_off_the_grid, TRAINER),
    LintRule("few-steps", "note", "a run of fewer than a hundred updates", few_steps),
)
