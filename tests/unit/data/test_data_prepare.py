"""From logs to datasets: every row accounted for, the same bytes again, nothing done twice."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from data_rows import SECRET, THINGS, WordRenderer, chat, write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus import build
from graftwork.data.prepare import PrepareJob, audit_files, prepare
from graftwork.data.render import rows
from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.files.dataset import iterate_drops, read_manifest, read_rows
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import Corrupted, NegativeResult, UserError
from graftwork.records.interaction import Message

ASKS = ("What does the {} cost?", "Who made our {} in 1950?", "Where can one borrow any {} on Sundays?")


def good_rows(asks=ASKS):
    return [
        chat(ask.format(thing), f"Number {n} answer on the {thing}.", status="success")
        for n, ask in enumerate(asks)
        for thing in THINGS
    ]


def preparation(tmp_path, rows=None, renderer=None, models=None, processes=1, on_progress=None, **changes):
    if rows is not None:
        write_log(tmp_path / "log.jsonl", rows)
    chosen = {"logs": ("log.jsonl",), "validation": 0.2, "test": 0.3, **changes}
    (tmp_path / "work").mkdir(exist_ok=True)
    return prepare(
        PrepareJob(
            AuditContext(settings=DataSettings(**chosen)),
            base="base",
            base_fingerprint="f",
            renderer=renderer or WordRenderer(),
            work=tmp_path / "work",
            out=tmp_path / "out",
            root=tmp_path,
            models=models or {"main": ModelSettings()},
        ),
        processes=processes,
        on_progress=on_progress,
    )


def run_all(tmp_path, *given, **changes):
    return preparation(tmp_path, *given, **changes).datasets


def run(tmp_path, rows=None, renderer=None, **changes):
    [made] = run_all(tmp_path, rows, renderer, **changes)
    return made.dataset, made.folder


def all_rows(folder):
    return [row for split in SPLITS for row in read_rows(folder, split)]


def splits_of(folder):
    return {(row.messages[-1].content, row.reply): s for s in SPLITS for row in read_rows(folder, s)}


def bytes_of(folder: Path):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(build, "BLOCK_BYTES", 1500)


def test_every_row_is_either_kept_or_dropped_with_a_reason(tmp_path):
    rows = [
        *good_rows(),
        good_rows()[0],
        chat("Is it open?", "Mock response"),
        chat("Is it closed?", '{"answer": "it is cl'),
        chat("Is it far?", "It is.", status="error"),
        chat("What is the time?", "Noon."),
        chat("What is the time?", "Midnight, by the tower clock."),
        chat("Say much", "word " * 60 + "end."),
        {"nothing": "here"},
    ]
    dataset, folder = run(tmp_path, rows, max_tokens=40)
    drops = list(iterate_drops(folder))
    assert {(drop.origin.line - 42, drop.step) for drop in drops} == {
        (1, "duplicate"),
        (2, "filter"),
        (3, "filter"),
        (4, "filter"),
        (5, "conflicting_answers"),
        (7, "render"),
        (8, "read"),
    }
    assert all(drop.reason for drop in drops)
    assert len(all_rows(folder)) + len(drops) == len(rows) == dataset.inputs[0].rows
    assert dataset.kept_after["render"] == len(all_rows(folder))
    assert dataset.dropped == {"read": 1, "filter": 3, "conflicting_answers": 1, "duplicate": 1, "render": 1}
    assert any(drop.reason.startswith("overlong: ") for drop in drops)
    assert any(drop.reason == "the same as log.jsonl:1" for drop in drops)


def test_every_line_of_the_log_can_be_found_again_by_its_hash(tmp_path):
    _, folder = run(tmp_path, [*good_rows(), good_rows()[3], chat("Is it open?", "Mock response")])
    hashes = {(row.origin.line, row.input_hash) for row in all_rows(folder)}
    hashes |= {(drop.origin.line, drop.input_hash) for drop in iterate_drops(folder)}
    assert {line for line, _ in hashes} == set(range(1, 45))
    assert all(len(input_hash) == 32 for _, input_hash in hashes)


def test_the_trained_span_is_the_reply(tmp_path):
    _, folder = run(tmp_path, good_rows())
    for row in all_rows(folder):
        assert len(row.tokens) - row.trained_from == len(row.reply.split()) + 1


def test_the_manifest_says_what_the_files_hold(tmp_path):
    dataset, folder = run(tmp_path, good_rows())
    assert read_manifest(folder) == dataset
    assert folder.name == dataset.content_hash
    for split in SPLITS:
        rows = read_rows(folder, split)
        summary = dataset.splits[split]
        assert summary.rows == len(rows) == sum(shard.rows for shard in summary.shards)
        assert summary.tokens == sum(len(row.tokens) for row in rows)
        assert list(summary.spread_lengths()) == sorted(len(row.tokens) for row in rows)
        assert summary.trained_tokens == sum(len(row.tokens) - row.trained_from for row in rows)


def test_the_packing_plan_holds_every_training_row_once_and_fits(tmp_path):
    dataset, folder = run(tmp_path, good_rows(), max_tokens=20, pack_tokens=64)
    lengths = [len(row.tokens) for row in read_rows(folder, "train")]
    packs = pq.read_table(folder / dataset.packing.file).column("rows").to_pylist()
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= 64 for pack in packs)
    assert dataset.packing.sequences == len(packs) < len(lengths)


def test_the_same_logs_give_the_same_bytes(tmp_path):
    first, folder = run(tmp_path, good_rows())
    before = bytes_of(folder)
    second, again = run(tmp_path)
    assert (first, folder) == (second, again)
    assert before == bytes_of(again)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [folder.name]


def test_several_processes_give_the_same_bytes_as_one(tmp_path, small_blocks):
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "log.jsonl", good_rows())
        run_all(tmp_path / name, processes=processes)
    assert bytes_of(tmp_path / "one" / "out") == bytes_of(tmp_path / "two" / "out")
    assert len(list((tmp_path / "two" / "work" / "sifted").glob("*.arrow"))) > 2


def test_rows_that_are_added_later_move_no_old_row_and_cost_only_themselves(tmp_path, small_blocks):
    _, folder = run(tmp_path, good_rows())
    before, old = splits_of(folder), bytes_of(folder)
    known = {path.name for path in (tmp_path / "work" / "sifted").glob("*.arrow")}
    shards = {path.name for path in (tmp_path / "work" / "shards").iterdir()}
    write_log(tmp_path / "log.jsonl", [*good_rows(), *good_rows(["How heavy is this {} of ours?"])])
    # A file whose name sorts first, too.
    write_log(tmp_path / "a.jsonl", good_rows(["When did the {} come to town?"]))
    _, grown = run(tmp_path, logs=("*.jsonl",))
    after = splits_of(grown)
    assert {question: after[question] for question in before} == before
    assert len(after) == len(before) + 2 * len(THINGS)
    still = {path.name for path in (tmp_path / "work" / "sifted").glob("*.arrow")}
    assert len(known - still) == 1, "only the block at the end of the old log is sifted again"
    assert len(shards & {path.name for path in (tmp_path / "work" / "shards").iterdir()}) == len(shards) - 1
    assert bytes_of(folder) == old, "the dataset that was made before stays as it was"


def test_rotating_a_log_moves_no_row_and_deleting_some_moves_no_other(tmp_path):
    asks = [*ASKS, "How heavy is this {} of ours?", "When did the {} come to town?"]
    rows = [{**row, "agent": ("coder", "writer")[n % 2]} for n, row in enumerate(good_rows(asks))]
    _, folder = run(tmp_path, rows)
    before = splits_of(folder)
    (tmp_path / "log.jsonl").unlink()
    write_log(tmp_path / "log.1.jsonl", rows[:40])
    write_log(tmp_path / "log.2.jsonl", [*rows[40:], chat("Is it new?", "It is.")])
    _, rotated = run(tmp_path, logs=("log.*.jsonl",))
    after = splits_of(rotated)
    assert {row: after[row] for row in before} == before
    (tmp_path / "log.1.jsonl").unlink()
    _, shortened = run(tmp_path, logs=("log.*.jsonl",))
    left = splits_of(shortened)
    assert len(left) == len(rows) - 40 + 1
    assert {row: after[row] for row in left} == left


def test_rows_that_are_away_for_a_time_come_back_to_their_split(tmp_path):
    write_log(tmp_path / "a.jsonl", good_rows()[:20])
    write_log(tmp_path / "b.jsonl", good_rows()[20:])
    _, folder = run(tmp_path, logs=("*.jsonl",))
    before = splits_of(folder)
    run(tmp_path, logs=("b.jsonl",))
    _, again = run(tmp_path, logs=("*.jsonl",))
    assert splits_of(again) == before


def test_rows_inserted_between_others_put_none_of_them_aside(tmp_path):
    _, folder = run(tmp_path, good_rows())
    before = splits_of(folder)
    mixed = []
    for number, row in enumerate(good_rows()):
        if number % 3 == 0:
            mixed.append(chat(f"{row['messages'][0]['content']} Please.", f"As said, number {number}."))
        mixed.append(row)
    _, again = run(tmp_path, mixed)
    after = splits_of(again)
    assert {row: after.get(row) for row in before} == before


def test_a_dataset_that_was_damaged_is_rebuilt(tmp_path):
    dataset, folder = run(tmp_path, good_rows())
    before = bytes_of(folder)
    (folder / dataset.splits["train"].shards[0].file).unlink()
    _, again = run(tmp_path)
    assert bytes_of(again) == before


def test_a_damaged_block_of_row_features_is_computed_again(tmp_path):
    _, folder = run(tmp_path, good_rows())
    before = splits_of(folder)
    [block] = (tmp_path / "work" / "sifted").glob("*.arrow")
    data = bytearray(block.read_bytes())
    data[len(data) // 3] ^= 64
    block.write_bytes(data)
    for name in ("decided.npz", "pins.npz"):
        (tmp_path / "work" / name).unlink()
    _, again = run(tmp_path, max_tokens=999)
    assert splits_of(again) == before


def test_signs_that_carry_the_meaning_make_another_row(tmp_path):
    output = ["C", "C++", "C#", "2+2", "2-2", "x < y", "x > y", "2.5", "25"]
    rows = [chat(f"What is {thing}?", f"It is number {n} of the list.") for n, thing in enumerate(output)]
    rows += [chat("Compare a and b!", "a < b."), chat("Compare a and b!", "a > b.")]
    dataset, _ = run(tmp_path, [*good_rows(), *rows], conflicts="keep_all")
    assert dataset.kept_after["duplicate"] == len(good_rows()) + len(rows)
    dataset, _ = run(tmp_path)
    assert dataset.dropped["conflicting_answers"] == 1


def test_an_empty_file_among_others_is_passed_over(tmp_path):
    write_log(tmp_path / "a.jsonl", good_rows())
    (tmp_path / "b.jsonl").touch()
    dataset, _ = run(tmp_path, logs=("*.jsonl", "./a.jsonl"))
    assert [(file.file, file.rows) for file in dataset.inputs] == [("a.jsonl", 42)]


def test_an_answer_that_does_not_fit_is_named_though_others_of_its_row_do(tmp_path):
    turns = [
        {"role": "user", "content": "Say one."},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Say much."},
        {"role": "assistant", "content": "word " * 60 + "end."},
    ]
    _, folder = run(tmp_path, [*good_rows(), {"messages": turns}], train_on="every", max_tokens=40)
    assert [row.reply for row in all_rows(folder) if row.origin.line == 43] == ["One."]
    [drop] = [drop for drop in iterate_drops(folder) if drop.origin.line == 43]
    assert drop.step == "render_part"
    assert "answer 2" in drop.reason


def test_rows_that_no_model_is_made_of_are_named(tmp_path):
    rows = [{**row, "agent": "coder" if n % 3 else "idle"} for n, row in enumerate(good_rows())]
    models = {"coder": ModelSettings(keep={"role": ["coder"]})}
    [made] = run_all(tmp_path, rows, models=models)
    assert made.dataset.dropped == {"models": 14}


def test_another_seed_reassigns_everything(tmp_path):
    _, folder = run(tmp_path, good_rows())
    _, again = run(tmp_path, seed=1)
    assert splits_of(folder) != splits_of(again)


def test_pieces_finished_before_a_crash_are_not_done_again(tmp_path, small_blocks, monkeypatch):
    write_log(tmp_path / "log.jsonl", good_rows())
    done = []

    class Killed(BaseException):
        pass

    def die_at_the_third(task):
        if len(done) == 2:
            raise Killed
        done.append(task.out)
        return render_block(task)

    render_block = rows.render_block
    monkeypatch.setattr("graftwork.data.render.dataset.render_block", die_at_the_third)
    with pytest.raises(Killed):
        run(tmp_path)
    assert not (tmp_path / "out").exists()
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.parquet")}
    monkeypatch.setattr("graftwork.data.render.dataset.render_block", render_block)
    dataset, folder = run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(all_rows(folder)) == dataset.kept_after["render"] == 42


def test_no_planted_secret_is_in_any_file(tmp_path):
    rows = good_rows()
    rows[3] = chat(
        f"My token is {SECRET}, why?", f"Since {SECRET} is old. Ask ann@firm.example.", session=SECRET
    )
    rows.append(chat("Is that so?", "Yes.", status=f"failed with {SECRET}"))
    dataset, folder = run(tmp_path, rows)
    output = [json.dumps(pq.read_table(path).to_pylist()) for path in folder.rglob("*.parquet")]
    output += [path.read_text() for path in folder.glob("*.json")]
    output += [
        path.read_bytes().decode(errors="ignore")
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != "log.jsonl"
    ]
    assert not any(SECRET in text or "ann@firm" in text for text in output)
    assert dataset.redactions["github_token"] >= 2


def test_the_system_prompt_goes_by_the_role(tmp_path):
    rows = [{**row, "agent": "coder" if n % 2 else "writer"} for n, row in enumerate(good_rows())]
    _, folder = run(tmp_path, rows, system_prompt="Answer.", system_prompts={"coder": "Write code."})
    for row in all_rows(folder):
        wanted = "Write code." if row.group == "coder" else "Answer."
        assert row.messages[0] == Message(role="system", content=wanted)
        assert [message.role for message in row.messages] == ["system", "user"]


def test_ids_are_unique_even_where_the_log_repeats_its_own(tmp_path):
    _, folder = run(tmp_path, [{**row, "id": "1"} for row in good_rows()])
    ids = [row.id for row in all_rows(folder)]
    assert len(set(ids)) == len(ids)


def test_a_long_conversation_becomes_a_row_of_each_turn_where_the_rule_says_so(tmp_path):
    turns = [
        {"role": role, "content": f"{role} says {word} " + "and more " * 6}
        for word in ("one", "two", "three")
        for role in ("user", "assistant")
    ]
    rows = [*good_rows(), {"messages": turns}]
    dataset, folder = run(tmp_path, rows, max_tokens=50, overlong="split_by_turn")
    made = [row for row in all_rows(folder) if row.origin.line == 43]
    assert [row.reply.split()[2] for row in made] == ["one", "two", "three"]
    assert len({row.id for row in made}) == 3
    assert all(len(row.tokens) <= 50 for row in made)
    assert "render" not in dataset.dropped


def test_conversations_that_end_with_the_same_words_are_prepared_like_others(tmp_path):
    def talk(row):
        turns = [*row["messages"], {"role": "user", "content": "Thanks, and region?"}]
        return {"messages": [*turns, {"role": "assistant", "content": f"North, for {row['messages'][1]}."}]}

    dataset, folder = run(tmp_path, [talk(row) for row in good_rows()])
    assert sum(summary.groups for summary in dataset.splits.values()) >= 0.7 * len(good_rows())
    asked = {split: {row.messages[0].content for row in read_rows(folder, split)} for split in SPLITS}
    assert all(asked.values())
    assert not asked["train"] & (asked["validation"] | asked["test"])


def test_every_reply_of_a_conversation_is_trained_on_where_the_settings_say_so(tmp_path):
    turns = [
        {"role": role, "content": f"{role} says {word}."}
        for word in ("one", "two", "three")
        for role in ("user", "assistant")
    ]
    _, folder = run(tmp_path, [*good_rows(), {"messages": turns}], train_on="every")
    made = [row for row in all_rows(folder) if row.origin.line == 43]
    assert [(len(row.messages), row.reply) for row in made] == [
        (1, "assistant says one."),
        (3, "assistant says two."),
        (5, "assistant says three."),
    ]
    assert len({row.id for row in made}) == 3
    assert len(all_rows(folder)) == 45


def test_each_model_gets_its_own_rows_and_what_is_held_out_is_so_for_all(tmp_path):
    asks = [
        f"{start} {{}} {end}?"
        for start in ("Is my", "Can our", "May the", "Does any", "Will his")
        for end in ("sold", "broken", "red", "here", "fixed", "tuned")
    ]
    rows = [
        {**row, "agent": ("coder", "writer", "tester")[n % 3], "stage": 1 + n % 4}
        for n, row in enumerate(good_rows(asks))
    ]
    models = {
        "main": ModelSettings(),
        "coder": ModelSettings(keep={"role": ["coder"]}, replay=0.25, curriculum=True, rl=0.5),
    }
    main, coder = run_all(tmp_path, rows, models=models)
    assert coder.dataset.model == "coder"
    held_out = {row.id for split in ("validation", "test") for row in read_rows(main.folder, split)}
    trained = read_rows(coder.folder, "train")
    apart = read_rows(coder.folder, "rl")
    assert not held_out & {row.id for row in [*trained, *apart]}
    assert {row.group for split in ("validation", "test") for row in read_rows(coder.folder, split)} == {
        "coder"
    }
    others = sum(row.group != "coder" for row in trained)
    assert others == coder.summary.replayed > 0
    assert apart
    assert {row.group for row in apart} == {"coder"}
    assert {row.stage for row in trained} == {1, 2, 3, 4}
    assert {row.stage for row in read_rows(main.folder, "train")} == {None}
    assert read_manifest(coder.folder).settings["model"]["rl"] == 0.5


def test_a_changed_file_is_noticed(tmp_path):
    dataset, folder = run(tmp_path, good_rows())
    path = folder / dataset.splits["test"].shards[0].file
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.unlink()
    path.write_bytes(changed)
    with pytest.raises(Corrupted, match="does not match the hash"):
        read_rows(folder, "test")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"base"', '"best"', 1))
    with pytest.raises(Corrupted):
        read_manifest(folder)


def test_too_few_rows_are_a_no_with_the_numbers(tmp_path):
    with pytest.raises(NegativeResult, match="no row is left") as caught:
        run(tmp_path, good_rows()[:1])
    assert "1 after read" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_no_logs_are_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no log"):
        run(tmp_path, logs=())


class Refusing(WordRenderer):
    def __init__(self, word):
        self.word = word

    def render(self, messages, reply):
        if self.word in messages[-1].content:
            return UserError("the reply cannot be shown to be what is trained", where="row")
        return super().render(messages, reply)


def test_a_row_that_the_template_refuses_is_dropped_and_all_of_them_are_a_no(tmp_path):
    _, folder = run(tmp_path, good_rows(), renderer=Refusing("zither"))
    assert [drop.reason for drop in iterate_drops(folder)] == [
        "refused by the template: the reply cannot be shown to be what is trained"
    ] * len(ASKS)
    (tmp_path / "other").mkdir()
    with pytest.raises(NegativeResult, match="no row is left") as caught:
        run(tmp_path / "other", good_rows(), renderer=Refusing(""))
    assert "cannot be shown" in caught.value.why


def test_a_key_to_split_by_that_no_row_has_is_refused_with_those_they_have(tmp_path):
    rows = [{**row, "metadata": {"tenant": f"t{n % 9}"}} for n, row in enumerate(good_rows())]
    with pytest.raises(UserError, match="custmer") as caught:
        run(tmp_path, rows, split_by="custmer")
    assert "metadata.tenant" in caught.value.fix
    _, folder = run(tmp_path, split_by="metadata.tenant")
    tenants: dict[str, set[str]] = {}
    for split in SPLITS:
        for row in read_rows(folder, split):
            tenants.setdefault(rows[row.origin.line - 1]["metadata"]["tenant"], set()).add(split)
    assert all(len(splits) == 1 for splits in tenants.values())


def test_settings_that_name_what_no_row_has_are_pointed_out(tmp_path):
    rows = [{**row, "agent": "coder"} for row in good_rows()]
    write_log(tmp_path / "log.jsonl", [*rows[:40], *({**row, "team": "x"} for row in rows[40:])])
    done = preparation(
        tmp_path,
        models={"main": ModelSettings(curriculum=True, weights={"tester": 2})},
        validation=0.1,
        split_by="team",
        system_prompts={"codr": "Write code."},
    )
    assert done.warnings == [
        "data.split_by: 40 rows have no 'team'; they are split by question",
        "models.main.weights: no kept row has 'tester'",
        "data.system_prompts: no kept row has the role 'codr'",
        "models.main.curriculum: no kept row has a stage",
    ]


def test_the_audit_and_the_preparation_agree(tmp_path):
    rows = [*good_rows(), good_rows()[1], chat("Is it open?", "Mock response"), chat("Why?", f"As {SECRET}.")]
    dataset, _ = run(tmp_path, rows)
    assert audit_files(["log.jsonl"], root=tmp_path).usable == dataset.kept_after["near_duplicate"]


QUESTION = st.lists(st.sampled_from([*THINGS, "where", "is", "the", "old"]), min_size=1, max_size=5).map(
    " ".join
)


@given(st.lists(st.tuples(QUESTION, QUESTION), min_size=1, max_size=25))
@settings(max_examples=25, deadline=None)
def test_whatever_is_logged_no_question_is_in_two_splits(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("any")
    try:
        _, made = run(folder, [chat(question, reply) for question, reply in pairs])
    except NegativeResult as error:
        if "no row is left" in error.what:
            return
        raise
    seen: dict[str, str] = {}
    for split in SPLITS:
        for row in read_rows(made, split):
            question = row.messages[-1].content
            assert seen.setdefault(question, split) == split


class BoundedRenderer(WordRenderer):
    """Fails on a text that should have been dropped by its characters."""

    def render(self, messages, reply):
        assert sum(len(message.content) for message in messages) + len(reply) <= 100 * 1024
        return super().render(messages, reply)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split_by_turn"])
def test_a_row_far_beyond_max_tokens_is_dropped_without_being_tokenized(tmp_path, overlong):
    endless = chat("Sum this up: " + "word " * 30_000, "It repeats itself.")
    dataset, _ = run(tmp_path, [*good_rows(), endless], BoundedRenderer(), overlong=overlong)
    assert dataset.dropped["render"] == 1


def test_rows_with_tool_calls_are_named_where_the_template_has_no_form_for_them(tmp_path):
    call = '<tool_call>\n{{"name": "find", "arguments": {{"n": {}}}}}\n</tool_call>'
    rows = good_rows()
    for number, row in enumerate(rows):
        row["messages"][-1]["content"] = call.format(number)
    assert any("rows call tools" in warning for warning in preparation(tmp_path, rows).warnings)
