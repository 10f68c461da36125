"""Conversations: loss on answers only, whole ones packed in rows, and bad lines named by file and line."""

import gzip
import json

import numpy as np
import pytest

from zero_jax.data import DataConfig, documents, load_dataset, load_tokenizer
from zero_jax.data.conversations import pack

END = 0  # of bytes


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def written(folder, *records, name="chat.jsonl"):
    path = folder / name
    path.write_text("".join(f"{json.dumps(r) if not isinstance(r, str) else r}\n" for r in records), encoding="utf-8")
    return str(path)


def loaded(path, *, seq_len=64, **settings):
    config = DataConfig(data=path, format="chat", validation_fraction=0.3, **settings)
    return load_dataset(config, seq_len=seq_len)


CONVERSATIONS = [
    chat(("user", f"say {i}"), ("assistant", "abc" * (i + 1)), ("user", "more"), ("assistant", "z")) for i in range(6)
]
PROMPTS = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(4)]


def unpacked(part, seq_len):
    """Returns each conversation of the rows: its text, and the text of the targets that count."""
    rows = part.cut_rows(np.arange(part.num_rows(seq_len=seq_len)), seq_len=seq_len)
    decode = load_tokenizer("bytes").decode
    found = []
    for inputs, targets, weights, segments in zip(*rows.values(), strict=True):
        for segment in np.unique(segments):
            here = segments == segment
            if not inputs[here].any():  # the padding
                assert not weights[here].any()
                continue
            text = decode(np.append(inputs[here], targets[here][-1]))
            found.append((text, decode(targets[here & (weights > 0)])))
    return found


def test_only_answers_and_their_ends_are_targets(tmp_path):
    dataset = loaded(written(tmp_path, *CONVERSATIONS, *PROMPTS))
    found = unpacked(dataset.train, 64) + unpacked(dataset.validation, 64)
    expected = [
        (
            f"<|user|>\nsay {i}\n<|assistant|>\n{'abc' * (i + 1)}\0<|user|>\nmore\n<|assistant|>\nz\0",
            f"{'abc' * (i + 1)}\0z\0",
        )
        for i in range(6)
    ] + [(f"{i} + {i} = {2 * i}\0", f"{2 * i}\0") for i in range(4)]
    fits = [(text, answers) for text, answers in expected if len(text) <= 65]
    assert sorted(pair for pair in found if len(pair[0]) < 65) == sorted(p for p in fits if len(p[0]) < 65)
    assert dataset.num_documents == 10


def test_forms_of_sharegpt_and_alpaca_are_the_messages_that_they_stand_for(tmp_path):
    def turns(*pairs, **more):
        return {"conversations": [{"from": speaker, "value": text} for speaker, text in pairs], **more}

    system = ("system", "be short")
    alpaca = {"instruction": "add", "input": "1 2", "output": "3"}
    same = [
        (turns(("human", "say a"), ("gpt", "abc"), id=1), chat(("user", "say a"), ("assistant", "abc"))),
        (turns(("user", "b"), ("assistant", "c"), system="be short"), chat(system, ("user", "b"), ("assistant", "c"))),
        (alpaca | {"text": "x", "prompt": "add: 1 2"}, chat(("user", "add\n\n1 2"), ("assistant", "3"))),
        (alpaca | {"input": "", "system": "be short"}, chat(system, ("user", "add"), ("assistant", "3"))),
        # What has a form of its own is of that one.
        (turns(("human", "x"), ("gpt", "y"), prompt="p", completion="c"), {"prompt": "p", "completion": "c"}),
        (turns(("human", "x"), **chat(("user", "a"), ("assistant", "b"))), chat(("user", "a"), ("assistant", "b"))),
    ]
    other = loaded(written(tmp_path, *(record for record, _ in same), name="other.jsonl"))
    own = loaded(written(tmp_path, *(record for _, record in same)))
    assert other.fingerprint == own.fingerprint
    assert "no text: 'conversations' (2), 'id' (1), 'prompt' (1), 'text' (1)" in str(other)
    weighed = turns(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    weighed["conversations"][1]["weight"] = 0
    dataset = loaded(written(tmp_path, weighed, *CONVERSATIONS))
    found = unpacked(dataset.train, 64) + unpacked(dataset.validation, 64)
    assert "d\0" in {answers for _, answers in found}


def test_rows_are_packed_with_whole_conversations():
    rows = pack(np.array([5, 3, 6, 2, 1, 8]), room=8)
    assert rows == ((0, 1), (2, 3), (4,), (5,))
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = pack(lengths, room=128)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert max(lengths[list(row)].sum() for row in rows) <= 128
    assert len(rows) < 1.1 * lengths.sum() / 128


def test_long_conversations_lose_their_end_and_are_counted(tmp_path):
    long = chat(("user", "go"), ("assistant", "x" * 100))
    dataset = loaded(written(tmp_path, *CONVERSATIONS, long), seq_len=96)
    assert "1 conversations are longer than 96 tokens and lose their end" in str(dataset)


def test_of_a_long_conversation_only_what_is_trained_on_counts(tmp_path):
    long = chat(("user", "go"), ("assistant", "x" * 10_000))
    dataset = loaded(written(tmp_path, *CONVERSATIONS, long), seq_len=96)
    assert len(dataset.train.rows) > 1, "the others are not all for validation"
    weights = dataset.train.cut_rows(np.arange(len(dataset.train.rows)), seq_len=96)["weights"]
    assert f"{int(weights.sum())} tokens of answers to learn" in str(dataset)


def test_answers_that_are_all_held_out_are_counted(tmp_path):
    config = DataConfig(data=written(tmp_path, *CONVERSATIONS), format="chat")
    dataset = load_dataset(config, seq_len=96, held_out=True)
    assert (
        f"{dataset.validation.is_answer.sum()} tokens of answers to predict, in {len(dataset.validation.rows)}"
        in str(dataset)
    )


def test_the_split_depends_on_content_alone(tmp_path):
    first = loaded(written(tmp_path, *CONVERSATIONS), seq_len=96)
    (tmp_path / "two").mkdir()
    second = loaded(written(tmp_path / "two", *reversed(CONVERSATIONS), name="other.jsonl"), seq_len=96)
    assert sorted(unpacked(first.validation, 96)) == sorted(unpacked(second.validation, 96))
    assert first.fingerprint == loaded(str(tmp_path / "chat.jsonl"), seq_len=96).fingerprint != second.fingerprint


def test_calls_reasoning_tools_and_weights_have_their_place(tmp_path):
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}},
        {"name": "g", "arguments": "{}"},
    ]
    messages = [
        {"role": "user", "content": "go", "name": "Ann"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls, "audio": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "four", "tool_calls": [], "weight": 1},
    ]
    record = {"messages": messages, "tools": [{"name": "f"}], "id": 7}
    dataset = loaded(written(tmp_path, record, *PROMPTS), seq_len=512)
    answer = (
        '<think>\nhm\n</think>\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "{}"}\n</tool_call>\0'
    )
    text = (
        '<|tools|>\n{"name": "f"}\n<|user|>\ngo\n<|assistant|>\nno\0<|assistant|>\n'
        f"{answer}<|tool|>\n4\n<|assistant|>\nfour\0"
    )
    assert (text, f"{answer}four\0") in unpacked(dataset.train, 512)
    assert "fields that are part of no text: 'id' (1), 'name' of messages (1), 'tool_call_id' of" in str(dataset)


def answer(**fields):
    """Returns a conversation whose answer has fields of its own."""
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **fields}]}


BAD = {
    "an unknown field": (
        answer(wieght=0),
        "message 2 has the field 'wieght', which has no place in the text: did you m",
    ),
    "half a weight": (answer(weight=0.5), "message 2: 'weight' is 0.5: give 0 for an answer that is not learned"),
    "no weight above 0": (answer(weight=0), "each answer has the weight 0: nothing of it could be learned"),
    "nothing said": (answer(content=None), "message 2: 'content' holds NoneType, not a string"),
    "calls of text": (answer(tool_calls="f()"), "message 2: 'tool_calls' is 'f()': give a list of objects"),
    "a call of nothing": (answer(tool_calls=[{"id": "1"}]), "message 2 has the call {'id': '1'}: give {'function': {"),
    "a user's call": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}]},
        "message 1 has 'tool_calls' and the role 'user': only an answer (assistant) has that",
    ),
    "tools of text": (answer() | {"tools": "f"}, "'tools' is 'f': give a list of objects, or leave it out"),
    "a turn in a message": (answer(content="<|user|>\nz"), "message 2 has the text '<|user|>', which marks a turn"),
    "half a character, deep": (
        answer(tool_calls=[{"function": {"name": "f", "arguments": {"\ud800": 1}}}]),
        "line 2 of {path}: message 2 holds a lone surrogate",
    ),
    "no JSON": ("{", "line 2 of {path} is no JSON"),
    "a list": ([1], "line 2 of {path} is a JSON list, not an object"),
    "other fields": (
        {"text": "x"},
        "line 2 of {path} has neither 'messages' nor 'prompt' and 'completion' (it has 'text')",
    ),
    "conversations of text": ({"conversations": "x"}, "line 2 of {path}: 'conversations' is 'x': give a list of mes"),
    "an unknown speaker": (
        {"conversations": [{"from": "humn", "value": "x"}]},
        "message 1 is from 'humn': did you mean 'human'? the names are human, gpt, system, user, assistant, tool",
    ),
    "two contents": (
        {
            "conversations": [
                {"from": "human", "value": "x", "role": "user", "content": "y"},
                {"from": "gpt", "value": ""},
            ]
        },
        "message 1 has the field 'from', which has no place in the text",
    ),
    "a system of a list": ({"instruction": "x", "output": "y", "system": []}, "'system' holds list, not a string"),
    "no value": ({"conversations": [{"from": "gpt"}]}, "message 1 has no field 'value'"),
    "no instruction": ({"instruction": "x"}, "line 2 of {path} has no field 'output'"),
    "no messages": ({"messages": []}, "line 2 of {path}: 'messages' is []: give a list of messages"),
    "a message of text": ({"messages": ["hi"]}, "line 2 of {path}: message 1 is str, not an object"),
    "no content": ({"messages": [{"role": "user"}]}, "line 2 of {path}: message 1 has no field 'content'"),
    "another role": (chat(("asistant", "x")), "message 1 has the role 'asistant': did you mean 'assistant'?"),
    "no answer": (chat(("user", "x")), "line 2 of {path} has no message of the role 'assistant'"),
    "no completion": ({"prompt": "x"}, "line 2 of {path} has no field 'completion'"),
    "a number": ({"prompt": "x", "completion": 3}, "line 2 of {path}: 'completion' holds int, not a string"),
    "half a character": (
        '{"prompt": "\\ud800", "completion": ""}',
        "line 2 of {path}: 'prompt' holds a lone surrogate",
    ),
    "a long prompt": (
        {"prompt": "x" * 70, "completion": "y"},
        "line 2 of {path}: no answer begins within the first 64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named(tmp_path, name):
    record, message = BAD[name]
    path = written(tmp_path, CONVERSATIONS[0], record, CONVERSATIONS[1])
    with pytest.raises(ValueError) as error:
        loaded(path)
    assert message.replace("{path}", path) in str(error.value)


def test_invalid_utf_8_is_named(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(json.dumps(PROMPTS[0]).encode() + b'\n{"prompt": "\xff", "completion": "x"}\n')
    with pytest.raises(ValueError, match=f"line 2 of {path} is not in UTF-8"):
        loaded(str(path))


def test_a_line_is_read_up_to_a_limit(tmp_path, monkeypatch):
    """A small file may be a large one, compressed."""
    monkeypatch.setattr(documents, "_MAX_LINE_BYTES", 1000)
    with gzip.open(tmp_path / "chat.jsonl.gz", "wb") as file:
        file.write(b" " * 10**6)
    with pytest.raises(ValueError, match=r"line 1 of .*chat.jsonl.gz has more than 1,000 bytes: divide it"):
        loaded(str(tmp_path / "chat.jsonl.gz"))


def test_too_few_conversations_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has 1 conversation, of which 0 fit into the validation_fraction of 0\.3"):
        loaded(written(tmp_path, CONVERSATIONS[0]))


def test_conversations_always_have_segments():
    assert DataConfig(format="chat").has_segments and not DataConfig().has_segments
