"""What `graft init` finds in a log, and what it proposes for it."""

import json
import random
import shutil

import pytest
import yaml

from graftwork.api.project import Project
from graftwork.data.ingest.read import read
from graftwork.data.prepare import audit_files
from graftwork.evaluate.preflight import try_metric
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.grading.interface import GradeContext
from graftwork.model import probe
from graftwork.project.folder import open_project
from graftwork.project.init import start_project
from graftwork.project.load import PROJECT_FILE, load_settings
from graftwork.project.propose import Size, choose_test_size, find_field, propose
from graftwork.project.upstream import start_with_upstream
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.interaction import Interaction, Origin
from graftwork.records.report import Case
from tickets import write_tickets

WORDS = ["river", "stone", "garden", "window", "letter", "market", "bridge", "winter", "copper", "signal"]


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    """The machine is not measured for each of these."""
    monkeypatch.setattr("graftwork.project.init.probe_device", probe.describe_device)


def write_log(path, make, count=120):
    chance = random.Random(3)
    lines = []
    for number in range(count):
        prompt, reply = make(number, chance)
        text = reply if isinstance(reply, str) else json.dumps(reply)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"id": str(number), "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def start(tmp_path, make, count=120):
    log = write_log(tmp_path / "log.jsonl", make, count)
    started = start_project(tmp_path, [str(log)], base="smollm2-135m-instruct")
    return started.proposal, load_settings(tmp_path / "graft.yaml")


def sentence(chance, words=12):
    return " ".join(chance.choice(WORDS) for _ in range(words))


def extract(number, chance):
    name, total = f"{chance.choice(WORDS)} {number}", round(chance.uniform(5, 900), 2)
    return f"Invoice of {name}: {total} EUR", {
        "customer": name,
        "total": total,
        "tags": ["a", "b"][: 1 + number % 2],
    }


def cite(number, chance):
    answer = {"answer": sentence(chance, 5), "citations": [1 + number % 2], "refused": False}
    if number % 6 == 0:
        answer = {"answer": "", "citations": [], "refused": True}
    return f"[1] {sentence(chance)}\n[2] {sentence(chance)}\n\nWhere is number {number}?", answer


def cite_words(number, chance):
    return (
        f"[1] {sentence(chance)}\n[2] {sentence(chance)}\n\nWhere?",
        f"{sentence(chance, 5)} [{1 + number % 2}].",
    )


def classify(number, chance):
    return sentence(chance), ("spam", "ham", "eggs")[number % 3]


def call(number, chance):
    arguments = {"city": chance.choice(WORDS), "days": number}
    return sentence(
        chance
    ), f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': arguments})}\n</tool_call>"


def code(number, chance):
    return sentence(chance), f"```python\ndef f_{number}(x):\n    return x + {number}\n```"


def chat(number, chance):
    return sentence(chance), sentence(chance, 20)


@pytest.mark.parametrize(
    ("make", "kind", "primary", "names"),
    [
        (extract, "extraction", "all_right", {"customer", "total", "tags", "json_valid", "all_right"}),
        (cite, "citation", "answer_match", {"json_valid", "citation_correct", "refusal_correct"}),
        (cite_words, "citation", "answer_match", {"citation_correct", "citation_coverage"}),
        (classify, "classification", "label", {"label", "task_success"}),
        (call, "tool_calls", "tool_calls", {"tool_calls", "chrf"}),
        (code, "code", "chrf", {"code_compiles", "chrf"}),
        (chat, "text", "chrf", {"chrf", "token_f1"}),
    ],
)
def test_init_finds_the_kind_of_task_and_metrics_that_fit(tmp_path, make, kind, primary, names):
    proposal, settings = start(tmp_path, make, count=70)
    assert proposal.kind == kind
    assert settings.gate.primary == primary
    assert names <= set(settings.evaluate.graded)
    assert proposal.formats == ("chat",)
    assert settings.data.format is None, "rows of other formats, such as captures, may be added"
    text = (tmp_path / "graft.yaml").read_text()
    assert proposal.kind_why in text
    assert all(rule.why in text for rule in proposal.rules)


RUN_SQL = {
    "type": "function",
    "function": {
        "name": "run_sql",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def write_sql_log(path, *, silent, broken=0, count=240):
    """Every `silent`th reply refuses, the first `broken` have arguments that were cut off."""
    chance = random.Random(5)
    lines = []
    for number in range(count):
        word = chance.choice(WORDS)
        question = f"How many rides did {word} {number} take?"
        query = json.dumps({"query": f"SELECT COUNT(*) FROM rides WHERE {word} < {number}"})
        if number < broken:
            query = query[:-9]
        reply = {"tool_calls": [{"type": "function", "function": {"name": "run_sql", "arguments": query}}]}
        if number % silent == silent - 1:
            question, reply = f"Delete {word} {number}.", {"content": f"I may not delete {word}."}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": None, **reply}]
        lines.append(json.dumps({"messages": messages, "tools": [RUN_SQL]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def propose_for(log):
    rows = [row for row in read([str(log)]) if isinstance(row, Interaction)]
    size = Size(longest=100, longest_reply=50, counted=False, context=2048)
    return propose(rows, formats=["chat"], size=size)


def test_calls_are_graded_by_value_and_replies_without_a_call_by_themselves(tmp_path):
    log = write_sql_log(tmp_path / "log.jsonl", silent=7)
    proposal = start_project(tmp_path, [str(log)], base="smollm2-135m-instruct").proposal
    assert (proposal.kind, proposal.checks) == ("tool_calls", ())
    assert {"tool_calls", "tool_calls_valid", "no_call_where_due"} <= set(proposal.metrics)
    assert load_settings(tmp_path / PROJECT_FILE).gate.primary == "tool_calls"


@pytest.mark.parametrize(("silent", "broken"), [(7, 0), (7, 30), (2, 60), (240, 0)])
def test_rules_on_calls_are_kept_by_the_log_itself(tmp_path, silent, broken):
    proposal = propose_for(write_sql_log(tmp_path / "log.jsonl", silent=silent, broken=broken))
    calling = 240 - 240 // silent
    broken -= broken // silent
    shares = {
        "tool_calls": (1.0, 1.0),
        "tool_calls_valid": (1 - broken / 240, 1.0),
        "no_call_where_due": (1.0, 1 - calling / 240),
    }
    assert proposal.rules
    for rule in proposal.rules:
        reached, about = shares[rule.metric]
        cases = round(about * proposal.test_cases)
        assert clopper_pearson(round(reached * cases), n=cases).low > rule.over, rule


def test_a_text_task_with_some_tool_calls_grades_them_too(tmp_path):
    proposal = propose_for(write_sql_log(tmp_path / "log.jsonl", silent=1, count=60))
    assert "tool_calls" not in proposal.metrics
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write(write_sql_log(tmp_path / "calls.jsonl", silent=99, count=20).read_text())
    proposal = propose_for(tmp_path / "log.jsonl")
    assert (proposal.kind, proposal.primary) == ("text", "chrf")
    assert {"tool_calls", "tool_calls_valid", "no_call_where_due"} <= set(proposal.metrics)


def test_init_proposes_a_refusal_metric_only_where_replies_refuse(tmp_path):
    _, settings = start(tmp_path, lambda n, chance: cite(6 * n + 1, chance))
    assert "refusal_correct" not in settings.evaluate.graded


def test_an_answer_inside_an_object_is_graded_where_its_words_and_citations_are(tmp_path):
    def nested(number, chance):
        prompt, reply = cite(number, chance)
        cited = "".join(f" [{source}]" for source in reply["citations"])
        answer = {"text": f"{reply['answer'] or 'The sources do not say.'}{cited}", "confidence": 0.9}
        return prompt, {"answer": answer, "sources": [{"label": sentence(chance, 3), "year": 1956}]}

    proposal, settings = start(tmp_path, nested)
    assert proposal.kind == "citation"
    assert (settings.evaluate.fields.answer, settings.evaluate.fields.citations) == ("answer.text",) * 2
    rows = [json.loads(line)["messages"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    cases = [
        Case(id=str(n), origin=Origin(file="log", line=n), messages=row[:1], reference=row[1]["content"])
        for n, row in enumerate(rows)
    ]
    context = GradeContext(fields=settings.evaluate.fields)
    assert all(try_metric(name, cases, context=context).cases for name in settings.evaluate.graded)


@pytest.mark.parametrize("sources", [[{"label": "a book"}], "a book"], ids=["objects", "words"])
def test_citations_that_hold_no_numbers_are_no_citation_task(tmp_path, sources):
    def unnumbered(number, chance):
        return cite(number, chance)[0], {"answer": sentence(chance, 5), "sources": sources}

    proposal, settings = start(tmp_path, unnumbered)
    assert proposal.kind != "citation"
    assert "citation_correct" not in settings.evaluate.graded


def test_each_field_is_compared_as_its_values_ask(tmp_path):
    proposal, settings = start(tmp_path, extract)
    rules = {check.field: check.metric for check in settings.evaluate.checks if check.field}
    assert rules == {"customer": "normalised", "total": "numeric", "tags": "set"}
    assert find_field("done", [True, False] * 30).rule == "exact"
    assert find_field("note", [sentence(random.Random(n), 30) for n in range(60)]).rule == "token_f1"
    assert find_field("total", [None, *(n + 0.5 for n in range(60))]).rule == "numeric"
    assert find_field("gone", [None] * 60) is None
    assert find_field("steps", [[{"text": sentence(random.Random(n), 30)}] for n in range(60)]) is None
    assert proposal.rows == 120


def test_fields_of_nested_objects_count_where_the_object_or_its_fields_may_be_null(tmp_path):
    def order(number, chance):
        name, town = f"{chance.choice(WORDS)} {number}", f"{chance.choice(WORDS)} {number % 17}"
        lines = [{"good": chance.choice(WORDS), "amount": number % 7, "note": None}]
        address = {"town": town} if number % 3 else None
        phone = f"phone {number}" if number % 2 else None
        prompt = f"{name} in {town}, {phone or 'no phone'}, wants {lines[0]['amount']} {lines[0]['good']}"
        return prompt, {"buyer": {"name": name, "phone": phone}, "address": address, "lines": lines}

    proposal, settings = start(tmp_path, order)
    paths = {"buyer.name", "buyer.phone", "address.town", "lines"}
    assert {field.path for field in proposal.fields} == paths
    (whole,) = (check for check in settings.evaluate.checks if check.metric == "all_fields")
    assert settings.gate.primary == whole.name
    assert set(whole.rule.fields) == paths
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[1])
    messages, right = row["messages"][:1], json.loads(row["messages"][1]["content"])
    case = Case(id="1", origin=Origin(file="log", line=2), messages=messages, reference=json.dumps(right))
    wrong = (
        {**right, "address": None},
        {**right, "buyer": {**right["buyer"], "phone": None}},
        {**right, "lines": [{**right["lines"][0], "amount": 9}]},
        {**right, "lines": []},
    )
    context = GradeContext(fields=settings.evaluate.fields)
    nowhere = case.model_copy(update={"reference": json.dumps({**right, "address": None})})
    assert whole.grade(nowhere, nowhere.reference, context) == 1
    assert whole.grade(nowhere, json.dumps({**right, "address": "unknown"}), context) == 0
    assert whole.grade(case, json.dumps(right), context) == 1
    assert [whole.grade(case, json.dumps(answer), context) for answer in wrong] == [0, 0, 0, 0]


def test_tickets_get_rules_that_a_model_which_learned_nothing_cannot_keep(tmp_path):
    write_tickets(tmp_path / "logs" / "tickets.jsonl")
    start_project(tmp_path, [str(tmp_path / "logs" / "tickets.jsonl")], base="smollm2-135m-instruct")
    settings = load_settings(tmp_path / "graft.yaml")
    assert settings.data.logs == ("logs/tickets.jsonl",)
    limits = {rule.metric: rule.over for rule in settings.gate.rules}
    assert limits.keys() == {"schema_valid", "all_right", "queue", "priority"}
    assert 1 / 6 < limits["queue"] < 0.3
    assert 0.45 < limits["priority"] < 0.65
    assert settings.gate.primary_rule.against == "base"
    assert settings.evaluate.fields.json_schema["properties"]["priority"]["enum"] == ["normal", "high", "low"]


@pytest.mark.parametrize(
    ("rows", "share", "reported"),
    [(5000, 0.1, "5 points"), (1000, 0.17, "10 points"), (310, 0.3, "15 points"), (100, 0.3, "34 points")],
)
def test_the_test_split_is_large_enough_for_a_gain_to_show(rows, share, reported):
    found, cases, why = choose_test_size(rows)
    assert found == pytest.approx(share)
    assert cases == round(found * rows)
    assert reported in why


def test_too_few_rows_are_reported_instead_of_guessed_from(tmp_path):
    write_log(tmp_path / "log.jsonl", chat, count=5)
    with pytest.raises(UserError, match="5 usable rows are too few"):
        start_project(tmp_path, [str(tmp_path / "log.jsonl")], base="smollm2-135m-instruct")
    assert not (tmp_path / "graft.yaml").exists()


@pytest.mark.parametrize(
    ("written", "why", "fix"),
    [
        (b"question,answer\nWhy?,Because.\n" * 30, "line 1: the row is not JSON", "one JSON object per line"),
        (
            '{"prompt": "Ein Café?", "completion": "Süß."}\n'.encode("latin-1") * 30,
            "line 1: the row is not UTF-8",
            "iconv",
        ),
        (b'{"foo": 1, "bar": "baz"}\n' * 30, "no known shape (keys: bar, foo)", "data.mapping"),
    ],
)
def test_a_log_of_which_no_row_can_be_read_is_refused_with_its_own_fix(tmp_path, written, why, fix):
    (tmp_path / "log.jsonl").write_bytes(written)
    with pytest.raises(UserError, match="no row of the log can be read") as refused:
        start_project(tmp_path, [str(tmp_path / "log.jsonl")], base="smollm2-135m-instruct")
    assert why in refused.value.why
    assert fix in refused.value.fix
    assert not (tmp_path / "graft.yaml").exists()


def test_rows_that_prepare_would_drop_do_not_count_towards_the_test_split(tmp_path):
    def make(number, chance):
        return f"Where is number {number}?", "Mock response" if number < 80 else sentence(chance)

    log = write_log(tmp_path / "log.jsonl", make, count=120)
    started = start_project(tmp_path, [str(log)], base="smollm2-135m-instruct")
    assert started.rows_read == 120
    assert started.proposal.rows == 40
    assert started.proposal.test_cases <= 12


def test_field_names_never_collide_with_metrics(tmp_path):
    def make(number, chance):
        return sentence(chance), {"json_valid": "ab"[number % 2], "Latency Seconds": "xy"[number % 2]}

    _, settings = start(tmp_path, make)
    assert [check.field for check in settings.evaluate.checks[:2]] == ["json_valid", "Latency Seconds"]
    assert settings.evaluate.checks[0].name == "json_valid_field"
    assert yaml.safe_load((tmp_path / "graft.yaml").read_text())["gate"]["primary"] == "all_right"


def test_fields_that_begin_as_metrics_do_get_rules_that_the_gate_accepts(tmp_path):
    def make(number, chance):
        return sentence(chance), {
            "answer": ("yes", "no")[number % 2],
            "code": ("E1", "E2", "E3")[number % 3],
            "cost": number % 4,
        }

    _, settings = start(tmp_path, make)
    fields = {check.name: check.field for check in settings.evaluate.checks if check.field}
    assert set(fields.values()) == {"answer", "code", "cost"}
    assert {fields.get(rule.metric) for rule in settings.gate.rules} >= {"answer", "code", "cost"}


@pytest.mark.parametrize("name", ["0", "true", "2026-11-15", "null", "1e3"])
def test_a_folder_whose_name_is_no_text_in_yaml_becomes_a_project_all_the_same(tmp_path, name):
    folder = tmp_path / name
    start_project(folder, [], base="smollm2-135m-instruct")
    assert load_settings(folder / "graft.yaml").project == name


def test_a_field_that_nobody_can_know_is_no_part_of_being_right(tmp_path):
    def make(number, chance):
        reply = {"queue": "ab"[number % 2], "size": number % 3, "trace": f"x{chance.getrandbits(40):x}"}
        return sentence(chance), reply

    _, settings = start(tmp_path, make)
    rules = {check.field: check.metric for check in settings.evaluate.checks if check.field}
    assert rules == {"queue": "exact", "size": "exact", "trace": "token_f1"}
    (everything,) = [check for check in settings.evaluate.checks if check.metric == "all_fields"]
    assert everything.model_extra["fields"] == ["queue", "size"]


def test_rows_that_repeat_others_are_not_usable_as_in_prepare(tmp_path):
    def make(number, chance):
        if number < 20:
            return "Where is the first one?", "On the left."
        if number < 30:
            return "Where is the second one?", f"Maybe at {number}, behind the {chance.choice(WORDS)}."
        return f"Where is number {number}?", sentence(chance)

    log = write_log(tmp_path / "log.jsonl", make, count=120)
    started = start_project(tmp_path, [str(log)], base="smollm2-135m-instruct")
    usable = audit_files([str(log)]).usable
    assert usable == 92
    assert (started.rows_read, started.rows_usable, started.proposal.rows) == (120, usable, usable)


def test_a_count_without_the_tokenizer_is_called_an_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.project.init.is_ready", lambda *_args, **_more: False)
    log = write_log(tmp_path / "log.jsonl", chat)
    started = start_project(tmp_path, [str(log)], base="smollm2-135m-instruct")
    assert started.estimated == "the tokenizer of smollm2-135m-instruct is not on this machine yet"


@pytest.mark.parametrize("base", ["qwen3", "someone/no-such-model"])
def test_a_base_that_there_is_not_is_refused_before_graft_yaml_is_written(tmp_path, monkeypatch, base):
    def refuse(name, _place):
        raise UserError(f"there is no base model {name}", fix="check the name")

    monkeypatch.setattr("graftwork.model.base.resolve", refuse)
    log = write_log(tmp_path / "log.jsonl", chat)
    with pytest.raises(UserError, match="there is no base model"):
        start_project(tmp_path, [str(log)], base=base)
    assert not (tmp_path / PROJECT_FILE).exists()


def test_an_unchanged_starter_gives_way_to_a_file_that_fits_the_log(tmp_path):
    start_project(tmp_path, [], base="smollm2-135m-instruct")
    with pytest.raises(UserError, match="already"):
        start_project(tmp_path, [], base="smollm2-135m-instruct")
    (tmp_path / "logs").mkdir()
    write_log(tmp_path / "logs" / "log.jsonl", chat)
    assert start_project(tmp_path, [], base="smollm2-135m-instruct").proposal is not None
    with pytest.raises(UserError, match="already"):
        start_project(tmp_path, [], base="smollm2-135m-instruct")


def test_a_project_in_front_of_a_large_model_keeps_its_endpoint_when_its_log_is_read(tmp_path):
    start_with_upstream(tmp_path, url="https://host/v1", model="gpt-4o", api_key_env="KEY")
    path = tmp_path / PROJECT_FILE
    path.write_text(path.read_text() + "  queue_limit: 7            # mine\n")
    log = write_log(tmp_path / "log.jsonl", chat)
    assert start_project(tmp_path, [str(log)], base="smollm2-135m-instruct").proposal is not None
    assert path.read_text().endswith("  queue_limit: 7            # mine\n")
    settings = load_settings(path)
    assert (settings.serve.models["gpt-4o"].to, settings.serve.queue_limit) == ("large", 7)
    assert settings.data.logs == ("log.jsonl",)
    path.write_text(path.read_text().replace("rank:", "rank: 4  #"))
    with pytest.raises(UserError, match="already"):
        start_project(tmp_path, [str(log)], base="smollm2-135m-instruct")


QWEN_3 = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' + m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def reasoning_base(tiny_base, tmp_path_factory):
    """A base whose template writes reasoning before every answer, unless it is asked not to."""
    folder = tmp_path_factory.mktemp("reasoning") / "base"
    shutil.copytree(tiny_base, folder)
    (folder / "chat_template.jinja").write_text(QWEN_3)
    return folder


def test_reasoning_is_dropped_where_the_template_refuses_the_answers_otherwise(
    tmp_path, tiny_base, reasoning_base
):
    for base, chosen in ((tiny_base, "keep"), (reasoning_base, "drop")):
        folder = tmp_path / chosen
        folder.mkdir()
        write_tickets(folder / "log.jsonl")
        started = start_project(folder, [str(folder / "log.jsonl")], base=str(base))
        assert started.proposal.drop_reasoning == (chosen == "drop")
        assert load_settings(folder / PROJECT_FILE).data.reasoning == chosen


def test_prepare_names_the_reasoning_setting_where_trying_it_helps(tmp_path, reasoning_base):
    write_tickets(tmp_path / "log.jsonl")
    (tmp_path / PROJECT_FILE).write_text(f"project: p\nbase: {reasoning_base}\ndata: {{logs: [log.jsonl]}}\n")
    with pytest.raises(NegativeResult, match="no row is left") as caught:
        Project(open_project(tmp_path)).prepare()
    assert "set data.reasoning to drop" in caught.value.fix
    assert "max_tokens" not in caught.value.fix


def test_one_enormous_row_raises_no_limit_beyond_what_the_base_reads(tmp_path, tiny_base):
    write_tickets(tmp_path / "log.jsonl")
    enormous = {"prompt": "Summarize: " + "many words " * 100_000, "completion": "so " * 100_000}
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write(json.dumps(enormous) + "\n")
    size = start_project(tmp_path, [str(tmp_path / "log.jsonl")], base=str(tiny_base)).proposal.size
    assert (size.context, size.too_long) == (2048, 1)
    settings = load_settings(tmp_path / PROJECT_FILE)
    assert settings.data.max_tokens < 1000
    assert settings.evaluate.max_new_tokens < 1000


def test_rows_of_unknown_tokens_stay_below_a_usual_context(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tickets(tmp_path / "log.jsonl")
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write(json.dumps({"prompt": "many words " * 100_000, "completion": "They are many."}) + "\n")
    start_project(tmp_path, [str(tmp_path / "log.jsonl")], base="someone/unknown-1b")
    assert load_settings(tmp_path / PROJECT_FILE).data.max_tokens <= 8192


def test_prepare_refuses_rows_longer_than_the_base_reads(tmp_path, tiny_base):
    write_tickets(tmp_path / "log.jsonl")
    data = "{logs: [log.jsonl], max_tokens: 7500064}"
    (tmp_path / PROJECT_FILE).write_text(f"project: p\nbase: {tiny_base}\ndata: {data}\n")
    with pytest.raises(UserError, match="reads 2,048 tokens") as caught:
        Project(open_project(tmp_path)).prepare()
    assert "set data.max_tokens to 2048" in caught.value.fix
