"""What would help, reckoned and not guessed. Pure.

Each remedy is the same question asked once more with one thing changed.
"""

from collections.abc import Callable, Iterator

from graftwork.plan.catalog.hardware import GUESSED
from graftwork.plan.serving.engines import MEASURED_DECODE, MEASURED_PREFILL, find_engine
from graftwork.plan.serving.memory import hold, in_words
from graftwork.plan.serving.question import Form, FormRow, ServeQuestion
from graftwork.plan.serving.speed import time_answers
from graftwork.plan.serving.words import READING_SECONDS, SLOW_SECONDS, say_seconds
from graftwork.records.hardware import Gpu, Machine

BEARABLE_SECONDS = 20.0
"""What a remedy aims at where no limit was named."""
SHORT_ANSWER = 50
FIRST_WITH_VLLM = 7.0
OF_USE = ("yes", "likely", None)
"""In time, or nobody asked for that."""

Rows = Callable[[ServeQuestion], tuple[FormRow, ...]]


def advise(
    question: ServeQuestion, row: FormRow, *, rows: tuple[FormRow, ...], cards: tuple[Gpu, ...], ask: Rows
) -> tuple[str, ...]:
    """What to change, the cheapest first; nothing where all is well."""
    slow = row.latency.answer_seconds.value > (question.limit_seconds or SLOW_SECONDS)
    if row.fits and not slow:
        return tuple(_say_reading(question, row))
    target = question.limit_seconds or BEARABLE_SECONDS
    said = [*_other_forms(row, rows=rows), *_adapters_instead(question, row.form)]
    said += _mixing_engine(question, row)
    said += _less_load(question, row, target=target) if row.fits else _less_memory(question, row.form)
    said += _other_card(question, cards=cards, target=target, ask=ask)
    return (*said, *_say_reading(question, row))


def _other_forms(row: FormRow, *, rows: tuple[FormRow, ...]) -> Iterator[str]:
    """The most bits that do it; where none do, the fastest that fits."""
    fitting = [other for other in rows if other.fits and other.form != row.form]
    good = [other for other in fitting if other.meets_limit in (("yes", "likely") if row.fits else OF_USE)]
    other = good[0] if good else min(fitting, key=lambda one: one.latency.answer_seconds.value, default=None)
    if other is None:
        return
    if not row.fits or other.latency.answer_seconds.value < row.latency.answer_seconds.value:
        yield (
            f"{other.form} ({other.format}): {other.holding.memory_gib.value:.1f} GiB, "
            f"{say_seconds(other.latency.answer_seconds.value)} an answer"
        )


def _adapters_instead(question: ServeQuestion, form: Form) -> Iterator[str]:
    """Whole models read their weights one after the other; adapters share one reading."""
    if question.copies == 1:
        return
    shared = question.model_copy(update={"copies": 1, "adapters": question.copies})
    held, latency = hold(shared, form), time_answers(shared, form)
    yield (
        f"{question.copies} adapters of rank {question.rank} on one base: {held.memory_gib.value:.1f} GiB"
        f"{'' if held.fits == 'yes' else ' (does not fit either)'}, "
        f"{say_seconds(latency.answer_seconds.value)} an answer"
    )


def _mixing_engine(question: ServeQuestion, row: FormRow) -> Iterator[str]:
    """Our own engine reads float32, but once for all adapters."""
    if question.adapters < 2 or question.users < 2 or question.engine != "llama.cpp" or question.cards:
        return
    ours = question.model_copy(update={"engine": "embedded"})
    answer = time_answers(ours, "32 bits").answer_seconds.value
    if hold(ours, "32 bits").fits == "yes" and answer < row.latency.answer_seconds.value:
        yield f"--engine embedded mixes adapters in one batch, in float32: {say_seconds(answer)} an answer"


def _less_memory(question: ServeQuestion, form: Form) -> Iterator[str]:
    if question.users > 1:
        alone = hold(question.model_copy(update={"users": 1}), form)
        if alone.fits == "yes":
            yield f"fewer users at once: one takes {alone.memory_gib.value:.1f} GiB"


def _less_load(question: ServeQuestion, row: FormRow, *, target: float) -> Iterator[str]:
    latency = row.latency
    prompts = latency.parts_seconds["prompts"].value
    if prompts > latency.answer_seconds.value / 3:
        yield (
            f"reading prompts takes {say_seconds(prompts)} of it: keep what all prompts begin with "
            "(prefix caching), or shorten them"
        )
    left = int((target - prompts) / latency.token_seconds.value)
    if SHORT_ANSWER <= left < question.answer:
        yield f"answers of at most {left} tokens take {say_seconds(target)}"
    if question.users > 1:
        alone = time_answers(question.model_copy(update={"users": 1}), row.form).answer_seconds.value
        yield f"one user at a time: {say_seconds(alone)} an answer"


def _other_card(
    question: ServeQuestion, *, cards: tuple[Gpu, ...], target: float, ask: Rows
) -> Iterator[str]:
    """The cheapest single card, by its launch price, that does it."""
    here = question.machine.gpu
    priced = [
        card for card in cards if card.launch_usd is not None and (here is None or card.name != here.name)
    ]
    for card in sorted(priced, key=lambda card: (card.launch_usd or 0.0, card.name)):
        machine = Machine(gpu=card, gpus=1, cpu=question.machine.cpu, ram_gib=question.machine.ram_gib)
        changes = {"machine": machine, "engine": "vllm", "form": "auto", "memory_limit_gib": None}
        for row in ask(question.model_copy(update=changes)):
            answer = row.latency.answer_seconds
            if row.fits and in_words(answer, target) in ("yes", "likely"):
                yield (
                    f"one {card.name} (${card.launch_usd:,.0f} at launch): {say_seconds(answer.value)} "
                    f"an answer in {row.form}"
                )
                return


def _say_reading(question: ServeQuestion, row: FormRow) -> Iterator[str]:
    token = row.latency.token_seconds.value
    if token > READING_SECONDS:
        yield f"a token every {say_seconds(token)} is slower than people read"


def list_notes(question: ServeQuestion, row: FormRow) -> tuple[str, ...]:
    """What the figures rest on, and what they leave out."""
    shape, gpu = question.shape, question.machine.gpu
    notes = [
        "load: "
        + (f"{question.users} users ask" if question.users > 1 else "one user asks")
        + f" again as soon as answered; {question.prompt} tokens read, {question.answer} written, "
        f"{question.context} held for each"
    ]
    notes += question.machine.assumed
    if question.doubt:
        notes.append(question.doubt)
    if question.context > shape.max_positions:
        notes.append(
            f"{question.context} tokens are more than the {shape.max_positions} the model was made for"
        )
    if question.cards > 1 and question.copies == 1 and shape.heads % question.cards:
        notes.append(
            f"{shape.heads} heads cannot be split evenly over {question.cards} cards: engines refuse"
        )
    if question.adapters > 1 and not find_engine(question.engine, on_card=gpu is not None).mixes_adapters:
        notes.append("llama.cpp reads the weights once for each adapter in use: its users do not share steps")
    if gpu is not None and row.form == "8 bits" and not gpu.has_fp8:
        notes.append(f"{gpu.name} has no FP8: 8 bits save memory, products run in half precision")
    if gpu is not None and row.form == "16 bits" and not gpu.has_bf16:
        notes.append(f"{gpu.name} has no bfloat16: serve in float16")
    if gpu is not None and question.engine == "vllm" and gpu.capability < FIRST_WITH_VLLM:
        notes.append(f"vLLM does not run on {gpu.name} (it needs compute capability 7.0): --engine llama.cpp")
    if question.machine.cpu is not None and gpu is None and question.machine.cpu.source == GUESSED:
        notes.append(
            f"{question.machine.cpu.name} is not in the catalog: its rates are guessed from its "
            f"{question.machine.cpu.cores} cores, within a factor of two"
        )
    if row.form in ("8 bits", "4 bits"):
        notes.append("fewer bits change answers: evaluate and gate the quantised model before it serves")
    return tuple(notes)


def list_sources(machine: Machine) -> tuple[str, ...]:
    """Of the figures that the answer rests on, each on one line."""
    device = machine.gpu or machine.cpu
    facts = () if device is None else (f"{device.name}: {device.source} ({device.dated or 'not dated'})",)
    return (*facts, " ".join(MEASURED_DECODE.split()), " ".join(MEASURED_PREFILL.split()))
