"""Exports keep the rules of those who read them, lose no row in silence, and are written whole."""

import json
import re

import pytest
import yaml
from dataset_samples import row, write_dataset
from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.export import formats, sink
from graftwork.data.export.formats import EXPORTERS, export_dataset
from graftwork.data.export.sink import EXPORT_FILE, ExportOptions, ExportRecord, split_calls
from graftwork.files.disk import file_digest
from graftwork.records.errors import Corrupted, UserError
from graftwork.text.tool_calls import write_tools

KAGGLE = ExportOptions(name="team/agent-logs")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fern"}}\n</tool_call>'
TWO_CALLS = f"I look twice.\n{CALL}\n{CALL}"


@pytest.fixture
def folder(tmp_path):
    """Rows of every kind: one turn, several, tools, pairs, weights."""
    train = [
        row("one?", "1", line=1, turns=[("system", "Be brief.")]),
        row("two?", "2", line=2, turns=[("user", "one?"), ("assistant", "1")]),
        row(None, "By the pond.", line=3, turns=[("user", "Where?"), ("assistant", CALL), ("tool", "pond")]),
        row(
            None,
            CALL,
            line=4,
            turns=[("user", "Twice?"), ("assistant", TWO_CALLS), ("tool", "a"), ("tool", "b")],
            weight=2.0,
        ),
        row("Which?", "the better", line=5, rejected="the worse"),
        row("Ünïcode 😀?", 'a "quoted"\nline', line=6),
    ]
    return write_dataset(
        tmp_path / "datasets",
        train=train,
        validation=[row("three?", "3", line=7)],
        test=[row("four?", "4", line=8), row("Pick?", "good", line=9, rejected="bad")],
        rl=[row("five?", "5", line=10)],
    )


def export(folder, out, form, **more):
    options = KAGGLE if form == "kaggle" else ExportOptions()
    return export_dataset(folder, out, format_name=form, **{"options": options, **more})


def read_lines(file):
    return [json.loads(line) for line in file.read_bytes().removesuffix(b"\n").split(b"\n")]


@pytest.mark.parametrize("form", EXPORTERS)
def test_every_format_names_the_dataset_and_every_file_with_its_hash(folder, tmp_path, form):
    made = export(folder, tmp_path / "out", form)
    assert ExportRecord.from_json((tmp_path / "out" / EXPORT_FILE).read_text()) == made
    assert made.dataset == folder.name
    files = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert files == {EXPORT_FILE, *(file.file for file in made.files)}
    for file in made.files:
        assert file_digest(tmp_path / "out" / file.file) == file.sha256
    assert made.splits == {"train": 6, "validation": 1, "test": 2}
    assert made.rows == 9 == sum(file.rows or 0 for file in made.files)
    assert made.preference_rows == 2
    assert made.left_out == ()


@pytest.mark.parametrize("form", EXPORTERS)
def test_the_same_dataset_gives_the_same_bytes(folder, tmp_path, form):
    assert export(folder, tmp_path / "a", form) == export(folder, tmp_path / "b", form)


@pytest.mark.parametrize("form", EXPORTERS)
def test_only_the_named_splits_go_out(folder, tmp_path, form):
    made = export(folder, tmp_path / "out", form, splits=["rl"])
    assert made.splits == {"rl": 1}
    assert not any("train" in file.file for file in made.files if file.rows is not None)


def test_openai_lines_keep_its_rules(folder, tmp_path):
    made = export(folder, tmp_path / "out", "openai")
    for name in ("train", "validation", "test"):
        for line in read_lines(tmp_path / "out" / f"{name}.jsonl"):
            require_openai(line["messages"], tools=line.get("tools", []))
            assert line["messages"][-1]["role"] == "assistant"
            require_weights(line["messages"])
    assert any("asks for 10" in note for note in made.notes)
    assert any("1 rows have a weight other than 1" in note for note in made.notes)


def test_openai_calls_are_taken_out_of_the_text_and_answered_by_id(folder, tmp_path):
    export(folder, tmp_path / "out", "openai")
    lines = read_lines(tmp_path / "out" / "train.jsonl")
    _, asked, answer, last = lines[2]["messages"]
    assert "content" not in asked
    assert asked["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"word": "fern"}'}
    assert answer == {"role": "tool", "content": "pond", "tool_call_id": asked["tool_calls"][0]["id"]}
    assert (asked["weight"], last["weight"]) == (0, 1)
    assert lines[3]["messages"][1]["content"] == "I look twice."
    assert [line["function"]["name"] for line in lines[3]["tools"]] == ["look_up"]
    ids = [call["id"] for message in lines[3]["messages"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 3


TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks.\u2028Once.", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_definitions_of_tools_leave_the_system_prompt_for_a_place_of_their_own(tmp_path, system):
    text = "\n\n".join(filter(None, [system, write_tools([TOOL])]))
    called = [("system", text), ("user", "q"), ("assistant", CALL), ("tool", "a")]
    folder = write_dataset(tmp_path, train=[row(None, "done", turns=called)])
    export(folder, tmp_path / "openai", "openai")
    (line,) = read_lines(tmp_path / "openai" / "train.jsonl")
    assert line["tools"] == [TOOL]
    assert [message["content"] for message in line["messages"] if message["role"] == "system"] == (
        [system] if system else []
    )
    require_openai(line["messages"], tools=line["tools"])
    export(folder, tmp_path / "llamafactory", "llamafactory")
    (item,) = json.loads((tmp_path / "llamafactory" / "train.json").read_text())
    assert (item["system"], json.loads(item["tools"])) == (system, [TOOL["function"]])


@pytest.mark.parametrize(
    "system", ["<tools>\nnot JSON\n</tools>", "<tools>", '# Tools\n<tools>\n{"name": "x"}\n</tools> mine']
)
def test_a_block_of_tools_that_is_not_ours_stays_in_the_system_prompt(tmp_path, system):
    folder = write_dataset(tmp_path, train=[row("q", turns=[("system", system)])])
    export(folder, tmp_path / "out", "openai")
    (line,) = read_lines(tmp_path / "out" / "train.jsonl")
    assert line["messages"][0]["content"] == system
    assert "tools" not in line


def test_openai_pairs_are_in_a_file_of_their_own(folder, tmp_path):
    export(folder, tmp_path / "out", "openai")
    (pair,) = read_lines(tmp_path / "out" / "train.preference.jsonl")
    assert pair == {
        "input": {"messages": [{"role": "user", "content": "Which?"}]},
        "preferred_output": [{"role": "assistant", "content": "the better"}],
        "non_preferred_output": [{"role": "assistant", "content": "the worse"}],
    }
    assert "the worse" not in (tmp_path / "out" / "train.jsonl").read_text()


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "q"), ("tool", "nobody asked")],
        [("user", "q"), ("assistant", CALL), ("user", "and?")],
        [("user", "q"), ("assistant", TWO_CALLS), ("tool", "only one")],
    ],
)
def test_openai_leaves_out_calls_without_answers_by_name(tmp_path, turns):
    folder = write_dataset(tmp_path, train=[row("fine?", line=1), row(None, line=2, turns=turns)])
    made = export(folder, tmp_path / "out", "openai")
    assert made.rows == 1
    assert [(report.rows, report.first[0].line) for report in made.left_out] == [(1, 2)]


def require_openai(messages, *, tools):
    """The rules of the chat format."""
    named = {tool["function"]["name"] for tool in tools}
    waiting = []
    for message in messages:
        assert message["role"] in {"system", "user", "assistant", "tool"}
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
            continue
        assert not waiting
        assert isinstance(message.get("content", ""), str)
        assert message.get("content") or message.get("tool_calls")
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function"
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", call["function"]["name"])
            assert call["function"]["name"] in named
            json.loads(call["function"]["arguments"])
            waiting.append(call["id"])


def require_weights(messages):
    replies = [message for message in messages if message["role"] == "assistant"]
    assert all("weight" not in message for message in messages if message["role"] != "assistant")
    assert all(message["weight"] == 0 for message in replies[:-1])
    assert replies[-1].get("weight", 1) == 1


def test_huggingface_folder_loads_with_its_own_library(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    export(folder, tmp_path / "out", "huggingface", options=ExportOptions(title="Logs", license="mit"))
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 5, "validation": 1, "test": 1}
    first = loaded["train"][0]
    assert first["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
    ]
    assert first["completion"] == [{"role": "assistant", "content": "1"}]
    assert loaded["train"][4]["completion"][0]["content"] == 'a "quoted"\nline'
    assert loaded["train"]["weight"][3] == 2.0
    pairs = datasets.load_dataset(str(tmp_path / "out"), "preference", cache_dir=str(tmp_path / "cache"))
    assert pairs["train"][0]["rejected"] == [{"role": "assistant", "content": "the worse"}]
    assert len(pairs["test"]) == 1


def test_huggingface_card_describes_the_files_that_are_there(folder, tmp_path):
    export(folder, tmp_path / "out", "huggingface")
    assert (tmp_path / "out" / "data" / "train-00000-of-00001.parquet").is_file()
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert [config["config_name"] for config in card["configs"]] == ["default", "preference"]
    for config, info in zip(card["configs"], card["dataset_info"], strict=True):
        assert {data_file["split"] for data_file in config["data_files"]} == {
            split["name"] for split in info["splits"]
        }
        for data_file in config["data_files"]:
            assert list((tmp_path / "out").glob(data_file["path"]))


def test_large_tables_become_several_files_with_their_number(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    shards = sink.ParquetShards(tmp_path, "data/t", schema=pa.schema([("n", pa.int64())]), rows_per_file=4)
    for n in range(10):
        shards.add({"n": n})
    names = shards.finish()
    assert names == [(f"data/t-{n:05d}-of-00003.parquet", rows) for n, rows in enumerate((4, 4, 2))]
    assert [n for name, _ in names for n in pq.read_table(tmp_path / name)["n"].to_pylist()] == list(
        range(10)
    )


def test_kaggle_metadata_keeps_its_rules(folder, tmp_path):
    export(folder, tmp_path / "out", "kaggle")
    metadata = json.loads((tmp_path / "out" / "dataset-metadata.json").read_text())
    assert metadata["id"] == "team/agent-logs"
    assert 3 <= len(metadata["id"].partition("/")[2]) <= 50
    assert 6 <= len(metadata["title"]) <= 50
    assert 20 <= len(metadata["subtitle"]) <= 80
    assert [license_["name"] in formats.LICENSES for license_ in metadata["licenses"]] == [True]
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    for resource in metadata["resources"]:
        assert (tmp_path / "out" / resource["path"]).is_file()


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(),
        ExportOptions(name="no-owner"),
        ExportOptions(name="team/ab"),
        ExportOptions(name="team/" + "a" * 51),
        ExportOptions(name="team/Upper Case"),
        ExportOptions(name="team/abc", title="Abc"),
        ExportOptions(name="team/agent-logs", title="x" * 51),
        ExportOptions(name="team/agent-logs", license="mine"),
    ],
)
def test_kaggle_refuses_what_kaggle_would_refuse_and_writes_nothing(folder, tmp_path, options):
    with pytest.raises(UserError) as caught:
        export(folder, tmp_path / "out", "kaggle", options=options)
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


def test_sagemaker_has_a_folder_a_channel_and_names_it(folder, tmp_path):
    place = ExportOptions(name="s3://our-bucket/agent/")
    export(folder, tmp_path / "out", "sagemaker", options=place)
    channels = json.loads((tmp_path / "out" / "channels.json").read_text())["InputDataConfig"]
    assert {channel["ChannelName"] for channel in channels} == {
        "train",
        "validation",
        "test",
        "train_preference",
        "test_preference",
    }
    for channel in channels:
        name = channel["ChannelName"]
        assert re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", name)
        source = channel["DataSource"]["S3DataSource"]
        assert source["S3Uri"] == f"s3://our-bucket/agent/{name}/"
        assert (source["S3DataType"], source["S3DataDistributionType"]) == ("S3Prefix", "FullyReplicated")
        assert read_lines(tmp_path / "out" / name / f"{name}.jsonl")
    with pytest.raises(UserError):
        export(folder, tmp_path / "other", "sagemaker", options=ExportOptions(name="our-bucket"))


def test_axolotl_trains_on_the_last_turn_alone(folder, tmp_path):
    export(folder, tmp_path / "out", "axolotl")
    for line in read_lines(tmp_path / "out" / "train.jsonl"):
        assert [message["train"] for message in line["messages"]] == [False] * (len(line["messages"]) - 1) + [
            True
        ]
        assert line["messages"][-1]["role"] == "assistant"
    part = yaml.safe_load((tmp_path / "out" / "axolotl.yaml").read_text())
    (dataset,) = part["datasets"]
    assert (dataset["type"], dataset["roles_to_train"], dataset["train_on_eos"]) == (
        "chat_template",
        [],
        "turn",
    )
    assert dataset["message_field_training"] == "train"
    for entry in (*part["datasets"], *part["test_datasets"]):
        assert (tmp_path / "out" / entry["path"]).is_file()
    pairs = yaml.safe_load((tmp_path / "out" / "axolotl-dpo.yaml").read_text())
    assert (pairs["rl"], pairs["datasets"][0]["type"]) == ("dpo", "chat_template.default")
    (line,) = read_lines(tmp_path / "out" / "train.preference.jsonl")
    assert line["chosen"] == {"role": "assistant", "content": "the better"}


def test_llamafactory_turns_alternate_and_every_file_is_described(folder, tmp_path):
    export(folder, tmp_path / "out", "llamafactory", options=ExportOptions(name="logs"))
    described = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert set(described) == {
        "logs_train",
        "logs_validation",
        "logs_test",
        "logs_train_preference",
        "logs_test_preference",
    }
    for name, one in described.items():
        is_pair = one.get("ranking", False)
        assert is_pair == name.endswith("_preference")
        for line in json.loads((tmp_path / "out" / one["file_name"]).read_text()):
            turns = line["conversations"]
            assert len(turns) % 2 == (1 if is_pair else 0)
            for odd, turn in zip([True, False] * len(turns), turns, strict=False):
                assert turn["from"] in ({"human", "observation"} if odd else {"gpt", "function_call"})
            for call in (turn for turn in turns if turn["from"] == "function_call"):
                json.loads(call["value"])
    assert yaml.safe_load((tmp_path / "out" / "sft.yaml").read_text())["mask_history"] is True


def test_llamafactory_calls_and_answers_have_roles_of_their_own(folder, tmp_path):
    export(folder, tmp_path / "out", "llamafactory")
    lines = json.loads((tmp_path / "out" / "train.json").read_text())
    assert lines[0]["system"] == "Be brief."
    assert [turn["from"] for turn in lines[2]["conversations"]] == [
        "human",
        "function_call",
        "observation",
        "gpt",
    ]
    assert json.loads(lines[2]["conversations"][1]["value"]) == {
        "name": "look_up",
        "arguments": {"word": "fern"},
    }
    spoken, answers = lines[3]["conversations"][1:3]
    assert spoken == {"from": "gpt", "value": TWO_CALLS}
    assert answers["value"].startswith("a\n")
    assert answers["value"].endswith("\nb")


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "a"), ("user", "b")],
        [("user", "a"), ("system", "b"), ("user", "c")],
        [("assistant", "a")],
        [],
    ],
)
def test_llamafactory_leaves_out_by_name_what_it_would_skip_in_silence(tmp_path, turns):
    folder = write_dataset(tmp_path, train=[row("fine?", line=1), row(None, line=2, turns=turns)])
    made = export(folder, tmp_path / "out", "llamafactory")
    assert made.rows == 1
    assert made.left_out[0].first[0].line == 2


CALLS = st.lists(
    st.tuples(st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers())),
    min_size=1,
    max_size=3,
)


@given(text=st.text(max_size=20).filter(lambda text: "tool_call>" not in text), calls=CALLS)
def test_calls_at_the_end_of_a_turn_are_taken_apart_without_loss(text, calls):
    blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    turn = split_calls(text + "".join(f"\n<tool_call>\n{block}\n</tool_call>" for block in blocks))
    assert turn.text == text.rstrip()
    assert [(call.name, call.arguments) for call in turn.calls] == calls


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "x"}', "{", "text", "\n"]), max_size=12
    )
)
def test_arguments_that_cannot_be_parsed_stay_text(parts):
    content = "".join(parts)
    turn = split_calls(content)
    assert turn.calls or turn.text == content
    assert not turn.calls or "<tool_call>" not in turn.text


@pytest.mark.parametrize("arguments", ['{"n": NaN}', r'{"c": "\ud800"}', '{"a": ' * 20_000, "[1]", '"text"'])
def test_arguments_that_could_not_be_written_again_stay_text(arguments):
    content = f'<tool_call>\n{{"name": "x", "arguments": {arguments}}}\n</tool_call>'
    assert split_calls(content).text == content


def test_large_numbers_in_arguments_stay_whole():
    turn = split_calls('<tool_call>{"name": "x", "arguments": {"n": 123456789012345678901}}</tool_call>')
    assert turn.calls[0].arguments == {"n": 123456789012345678901}


def test_many_broken_calls_are_no_way_to_stop_an_export():
    content = "<tool_call>{}</tool_call>" * 20_000 + "!"
    assert split_calls(content).text == content


def test_another_folder_is_not_overwritten_unless_forced_and_then_nothing_else_is_lost(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="thesis"):
        export(folder, out, "openai")
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    export(folder, out, "openai", force=True)
    assert (out / "thesis.txt").read_text() == "mine"
    assert (out / "train.jsonl").is_file()


def test_an_export_of_ours_is_replaced_whole(folder, tmp_path):
    out = tmp_path / "out"
    export(folder, out, "openai")
    export(folder, out, "axolotl")
    assert (out / "axolotl.yaml").is_file()
    assert not (out / "validation.preference.jsonl").exists()
    assert ExportRecord.from_json((out / EXPORT_FILE).read_text()).format == "axolotl"
    (out / "note.md").write_text("mine")
    with pytest.raises(UserError, match=r"note\.md"):
        export(folder, out, "openai")
    export(folder, out, "openai", force=True)
    assert (out / "note.md").read_text() == "mine"
    assert not (out / "axolotl.yaml").exists()


def test_nothing_is_left_behind_when_an_export_fails(folder, tmp_path):
    shard = folder / "test-0.parquet"
    shard.write_bytes(b"damaged")
    (tmp_path / "new").mkdir()
    with pytest.raises(Corrupted):
        export(folder, tmp_path / "new" / "out", "huggingface")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_reported(folder, tmp_path):
    (tmp_path / "out").write_text("a file")
    for force in (False, True):
        with pytest.raises(UserError, match="not a folder"):
            export(folder, tmp_path / "out", "openai", force=force)


def test_an_empty_split_is_nothing_to_export(tmp_path):
    folder = write_dataset(tmp_path, train=[row("q")])
    with pytest.raises(UserError, match="nothing to export"):
        export(folder, tmp_path / "out", "openai", splits=["validation"])
