"""Runs of other tools: what their formats share, what is exported, and the runs as one Report.

Input: files as inspect-ai (`inspect_ai`) or lm-eval (`lm_eval`) write them, and this project's cases if any.
Output: ForeignRun and its parts; a report with its cases and answers, whose scores are the other tool's own;
intervals and pairs are computed as usual. The bytes of an `.eval` archive are checked by CRC and never
written to disk; Python reads zstd in zip files only from 3.14 on, so zstd is unpacked here. Nothing of a file
is executed, and no package of theirs is needed.
"""

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.comparison import compare, what_cases_show
from graftwork.evaluate.report import average, make_metric, sessions_of, slice_report
from graftwork.files.disk import explain_os_error
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Answer, Case, Comparison, Generation, Metric, Report, SubjectReport

MOST_BYTES = 2 << 30
"""Size limit of a file, or of an unpacked archive."""
OWN_KEY = "graftwork"
"""Key under which our exports store what the other format cannot represent."""

ZSTD = 93
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

CUTS = ("group", "domain", "length")


class ForeignSample(Record):
    """One answer to one question, with the scores that the other tool gave it."""

    case: Case
    answer: Answer
    scores: dict[str, float | None] = {}

    def named(self, name: str) -> "ForeignSample":
        """Return the same run under another id."""
        case = self.case.model_copy(update={"id": name})
        return self.model_copy(
            update={"case": case, "answer": self.answer.model_copy(update={"case_id": name})}
        )


class ForeignRun(Record):
    tool: str
    subject: str
    file: str
    samples: tuple[ForeignSample, ...]
    totals: tuple[Metric, ...] = ()
    """Figures without their samples: they can be shown but not compared in pairs."""
    settings: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    """What is missing, one sentence each."""


class ImportedEvaluation(Record):
    """The imported results, their page, and whether they are about this project's cases."""

    report: Report
    same_cases: bool
    why: str
    """Why the gate can, or cannot, decide on it."""
    notes: tuple[str, ...] = ()
    page: str = ""


Answers = dict[str, tuple[Answer, ...]]
"""Answers of each subject by its name."""


def import_runs(
    runs: Sequence[ForeignRun], *, own_cases: Sequence[Case] = ()
) -> tuple[ImportedEvaluation, tuple[Case, ...], Answers]:
    """The first run is the baseline, the second the candidate; a single one is only shown."""
    if not runs:
        raise UserError("there is nothing to import", fix="specify at least one file")
    subjects_so_far: list[str] = []
    named_runs = []
    for run in runs:
        # Two runs of one model are two subjects.
        name, number = run.subject, 2
        while name in subjects_so_far:
            name, number = f"{run.subject} ({number})", number + 1
        subjects_so_far.append(name)
        named_runs.append(run.model_copy(update={"subject": name}))
    runs = named_runs
    cases, clashing = _gather_cases(runs)
    same, why = _held_against(cases, own_cases)
    if same:
        # Our ids for cases that are ours.
        ours = {prompt_key(case): case.id for case in own_cases}
        runs = [
            run.model_copy(update={"samples": tuple(s.named(ours[prompt_key(s.case)]) for s in run.samples)})
            for run in runs
        ]
        cases = tuple(own_cases)
    subjects = [_subject_report(run, sessions_of(cases)) for run in runs]
    notes = [f"{run.subject}: {note}" for run in runs for note in run.notes]
    if clashing:
        notes.append(f"{len(clashing)} cases have one id and different prompts, and were not paired.")
    report = _make_report(subjects, cases=cases, source=", ".join(dict.fromkeys(run.tool for run in runs)))
    imported = ImportedEvaluation(report=report, same_cases=same, why=why, notes=tuple(notes))
    return imported, cases, {run.subject: tuple(sample.answer for sample in run.samples) for run in runs}


def prompt_key(case: Case) -> str:
    """Key of the question and what counts as correct, whatever its id."""
    turns = [[message.role, message.content] for message in case.messages]
    return fingerprint([turns, case.reference])


def _make_report(subjects: Sequence[SubjectReport], *, cases: Sequence[Case], source: str) -> Report:
    sessions = sessions_of(cases)
    baseline, candidate = subjects[0], subjects[min(1, len(subjects) - 1)]
    pairs: tuple[Comparison, ...] = ()
    for other_subject in subjects[1:]:
        pairs += tuple(c for c in compare(baseline, candidate=other_subject, sessions=sessions) if c.n)
    graded = next((c for c in pairs if candidate.metrics[c.metric].kind != "number"), None)
    report = Report(
        cases_hash=hash_cases(cases),
        cases=len(cases) or max(m.n for subject in subjects for m in subject.metrics.values()),
        baseline=baseline,
        candidate=candidate,
        comparisons=pairs,
        groups={case.id: case.group for case in cases if case.group is not None},
        sessions=sessions,
        others=tuple(subjects[2:]),
        power=what_cases_show(graded.n, comparison=graded) if graded is not None else None,
        source=source,
    )
    return slice_report(report, cases, by=CUTS)


def _gather_cases(runs: list[ForeignRun]) -> tuple[tuple[Case, ...], set[str]]:
    """All cases, each once. The same id with another prompt is another case, renamed in its run."""
    cases: dict[str, Case] = {}
    clashing: set[str] = set()
    for index, run in enumerate(runs):
        samples = []
        for read in run.samples:
            name, sample = read.case.id, read
            if name in cases and prompt_key(cases[name]) != prompt_key(read.case):
                clashing.add(name)
                sample = read.named(f"{name} ({run.subject})")
            cases.setdefault(sample.case.id, sample.case)
            samples.append(sample)
        runs[index] = run.model_copy(update={"samples": tuple(samples)})
    return tuple(cases.values()), clashing


def _held_against(cases: Sequence[Case], own_cases: Sequence[Case]) -> tuple[bool, str]:
    if not own_cases:
        return False, "Not gated: this project has no evaluation yet whose cases these could be."
    theirs, ours = {prompt_key(case) for case in cases}, {prompt_key(case) for case in own_cases}
    common = len(ours & theirs)
    if theirs == ours and len(ours) == len(own_cases):
        return True, (
            f"These are the {len(own_cases)} cases of this project, so the answers were graded by its own "
            "metrics too and can be held against its other subjects."
        )
    return False, (
        f"Not gated: {common} of this project's {len(own_cases)} cases are among the {len(cases)} imported "
        "ones, and a verdict on other questions says nothing about these."
    )


def _subject_report(run: ForeignRun, sessions: dict[str, str]) -> SubjectReport:
    marks: dict[str, dict[str, list[float | None]]] = {}
    for sample in run.samples:
        for name, mark in sample.scores.items():
            marks.setdefault(name, {}).setdefault(sample.case.id, []).append(mark)
    metrics = {
        name: make_metric(
            name, scores={case: average(repeats) for case, repeats in by_case.items()}, sessions=sessions
        )
        for name, by_case in marks.items()
    }
    metrics |= {total.name: total for total in run.totals}
    if not metrics:
        raise UserError(
            "the file contains no scores",
            why="without scores there is nothing to show or compare",
            fix="score the run with the other tool first, or import its answers as a subject",
            where=run.file,
        )
    seconds = sum(sample.answer.seconds for sample in run.samples)
    tokens = sum(sample.answer.tokens for sample in run.samples)
    generation = Generation(
        subject=run.subject,
        answers=len(run.samples),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        single_latency_seconds=(),
        peak_memory_gib=0.0,
        settings=run.settings,
    )
    return SubjectReport(subject=run.subject, metrics=metrics, generation=generation)


def read_document(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise too_large(path)
        return parse(path.read_bytes(), where=str(path))
    except OSError as error:
        raise explain_os_error(error, path) from error


def parse(content: bytes | str, *, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Corrupted(
            "the file contains no readable JSON",
            why=str(error) or "it is nested too deeply",
            fix="use the complete file as the other tool wrote it",
            where=where,
        ) from error


def too_large(path: Path) -> UserError:
    return UserError(
        f"the file contains more than {MOST_BYTES >> 30} GiB",
        why="results are read into memory as a whole",
        fix="write fewer samples into one log",
        where=str(path),
    )


def not_as_expected(what: str, *, why: str, where: str) -> UserError:
    return UserError(
        what,
        why=why,
        fix="give an inspect-ai log (.json, .eval) or lm-eval's results_*.json or samples_*.jsonl",
        where=where,
    )


def number_of(value: Any) -> float | None:
    """Return a mark as a number; None if it is not one."""
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    return None


def text_of(content: Any) -> str:
    """Return the text of a turn: plain, or in parts of which only those with text count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def make_messages(turns: Any) -> tuple[Message, ...]:
    """Turns as another tool wrote them; roles that we do not know count as the user's."""
    messages = []
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict):
            role = turn.get("role")
            known_role = role if role in ("system", "user", "assistant", "tool") else "user"
            messages.append(
                Message.model_validate({"role": known_role, "content": text_of(turn.get("content"))})
            )
    return tuple(messages)


def section(value: Any, key: str) -> dict[str, Any]:
    """The value of the key if it is an object, else an empty one."""
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def named(value: Any, key: str) -> str | None:
    text = value.get(key) if isinstance(value, dict) else None
    return text if isinstance(text, str) and text else None


def whole_number(value: Any) -> int:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if isinstance(value, str | int | float | bool)}


def origin_of(facts: dict[str, Any], here: Origin) -> Origin:
    """Return where a case of ours came from; `here` if another tool created it."""
    return Origin(file=named(facts, "file") or here.file, line=whole_number(facts.get("line")) or here.line)


def read_members(path: Path, *, wanted: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Every member whose name begins with one of `wanted`, in the order of the archive."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = [m for m in archive.infolist() if m.filename.startswith(wanted)]
            if sum(member.file_size for member in members) > MOST_BYTES:
                raise too_large(path)
            for member in members:
                content = _unpack_zstd(file, member, path) if member.compress_type == ZSTD else None
                yield member.filename, archive.read(member) if content is None else content
    except OSError as error:
        raise explain_os_error(error, path) from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _damaged(path, str(error)) from error


def _unpack_zstd(file: BinaryIO, member: zipfile.ZipInfo, path: Path) -> bytes:
    import zstandard

    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise _damaged(path, f"{member.filename} is cut off")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    file.seek(name_length + extra_length, io.SEEK_CUR)
    packed = io.BytesIO(file.read(member.compress_size))
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as stream:
            # One byte more than promised: a member that lies about its size is seen.
            content = stream.read(member.file_size + 1)
    except zstandard.ZstdError as error:
        raise _damaged(path, f"{member.filename}: {error}") from error
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise _damaged(path, f"{member.filename} does not have the bytes that the archive promises")
    return content


def _damaged(path: Path, why: str) -> Corrupted:
    return Corrupted(
        "the archive cannot be read",
        why=why,
        fix="copy it whole, or write it as JSON: `inspect log convert --to json`",
        where=str(path),
    )


class SubjectExport(NamedTuple):
    """`when` is the time that goes into the file, in ISO 8601 with its zone."""

    task: str
    cases: Sequence[Case]
    subject: SubjectReport
    answers: Sequence[Answer]
    cases_hash: str
    when: str
    version: str

    @property
    def date(self) -> str:
        """The time in the format of file names."""
        return datetime.fromisoformat(self.when).replace(tzinfo=None).isoformat().replace(":", "-")

    @property
    def folder(self) -> str:
        """Name of the subject as a file or folder: lm-eval creates a folder for each model."""
        return re.sub(r"[\"<>:/|\\?*\[\]]+", "__", self.subject.subject)


def graded_metrics(subject: SubjectReport) -> dict[str, Metric]:
    """Metrics that grade each answer: these formats cannot represent others."""
    return {
        name: metric
        for name, metric in subject.metrics.items()
        if metric.scores and any(value is not None for value in metric.scores.values())
    }


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean, as both tools write it."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def own_facts(case: Case) -> dict[str, Any]:
    """Facts that the other formats cannot represent, so that nothing is lost on import."""
    facts = {"group": case.group, "domain": case.domain, "session": case.session}
    present: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
    return {**present, "file": case.origin.file, "line": case.origin.line}


def write_json(document: Any, *, indent: int | None = None) -> str:
    """Lone surrogates, which a model may write and no reader accepts, become the replacement character."""
    return re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(document, ensure_ascii=False, indent=indent))
