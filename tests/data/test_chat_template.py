"""Chat templates: text and tokens as transformers makes them, answers found in them, and what has no place refused."""

import json
import re
import sys
import unicodedata

import numpy as np
import pytest
from test_conversations import chat, written

from zero_jax.data import DataConfig, chat_template, load_dataset, load_tokenizer
from zero_jax.data.chat_template import Turn
from zero_jax.data.conversations import _of_rendered

pytest.importorskip("jinja2")

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
THINKING = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}"
)
TALK = chat(("user", " one? "), ("assistant", "Two."), ("user", "three?"), ("assistant", "Four, at <last>."))
# What transformers 5.23 renders (`apply_chat_template(..., tokenize=False)`), and of it what is learned.
EXPECTED = {
    "chatml": (
        CHATML,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\nTwo."
        "<|im_end|>\n<|im_start|>user\nthree?<|im_end|>\n<|im_start|>assistant\nFour, at <last>.<|im_end|>\n",
        "Two.<|im_end|>\nFour, at <last>.<|im_end|>\n",
    ),
    "alternating": (
        ALTERNATING,
        "<s>[INST]  one?  [/INST] Two.</s>[INST] three? [/INST] Four, at <last>.</s>",
        " Two.</s> Four, at <last>.</s>",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a tokenizer's folder with a template, and returns the tokenizer's path."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    library.train_from_iterator(["user assistant system one two three four at last"] * 4, trainer)
    library.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])

    def write(template, **config):
        library.save(str(tmp_path / "tokenizer.json"))
        texts = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
        config = texts | {"chat_template": template} | config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return str(tmp_path / "tokenizer.json")

    write.library = library
    return write


def loaded(tmp_path, tokenizer, *records):
    data = written(tmp_path, *records)
    config = DataConfig(data=data, format="chat", tokenizer=tokenizer, validation_fraction=0.5)
    return load_dataset(config, seq_len=256)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", ["a string", "by name", "a file"])
def test_text_and_answers_are_those_of_the_template(tmp_path, folder, name, form):
    template, text, answers = EXPECTED[name]
    path = folder({"by name": [{"name": "default", "template": template}], "a string": template}.get(form, "no"))
    if form == "a file":
        (tmp_path / "chat_template.jinja").write_text(template)
    dataset = loaded(tmp_path, path, {**TALK, "tools": None}, {"prompt": "a", "completion": "b"})
    part = dataset.train  # more than half of all tokens
    folder.library.encode_special_tokens = False
    whole = folder.library.encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(part.tokens[: len(whole)], whole)
    decode = lambda ids: folder.library.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
    first = slice(0, len(whole))
    assert decode(part.tokens[first]) == text
    assert decode(part.tokens[first][part.is_answer[first]]) == answers
    assert dataset.tokenizer.vocab_size > part.tokens.max() > folder.library.get_vocab_size(with_added_tokens=False) - 1
    assert "messages as by the chat template of" in str(dataset)


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (CHATML, chat(("user", "a<|im_end|>b"), ("assistant", "c")), r"message 1 has the text '<|im_end|>', which the"),
        (
            ALTERNATING,
            chat(("assistant", "a"), ("user", "b")),
            "fails for the first 2 messages (TemplateError: roles must",
        ),
        (
            THINKING,
            chat(("user", "a"), ("assistant", "b</think>c"), ("user", "d"), ("assistant", "e")),
            "renders the conversation up to message 2 otherwise when more follows",
        ),
        ("{{ strftime_now('%d') }}", TALK, "UndefinedError: 'strftime_now' is undefined"),
        ("{% for %}", TALK, "tokenizer_config.json has no valid chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", TALK, "SecurityError"),
        (3, TALK, "'chat_template' holds int, not a string"),
        ([{"name": "tool_use", "template": ""}], TALK, "none of its 1 chat templates is called 'default'"),
        ("{{ messages[0].content }}", TALK, "message 2 has the field 'content', which the chat template of"),
        (CHATML, {**TALK, "tools": [{"name": "f"}]}, "has 'tools', which the chat template of"),
        # What would never end, or fill the memory.
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, TALK, "takes more than 0 s of processor time"),
        ("{{ (messages | length + 9) ** (10 ** 9) }}", TALK, "takes more than 0 s of processor time"),
        ("{{ [1] | slice(10 ** 9) | list }}", TALK, "takes more than 0 s of processor time"),
        ("{{ 'a' * 10 ** 10 }}", TALK, "MemoryError: it takes more memory than it may"),
        ("{{ '%9999999999d' % messages | length }}", TALK, "Error"),
        ("{% for a in range(999) %}{{ 'a' * 10 ** 6 }}{% endfor %}", TALK, "has more than 16,777,216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TALK, "RecursionError"),
        # What no text can be made of.
        ("{{ 10 ** 5000 }}", TALK, "has no valid chat template (ValueError: Exceeds the limit"),
        ("{{ " + "[" * 3000 + "]" * 3000 + " }}", TALK, "has no valid chat template (RecursionError"),
        ("{% for m in messages %}{{ m.content }}{{ '\\ud800' }}{% endfor %}", TALK, "renders a lone surrogate"),
        ("{{ [1, 2] | random }}", TALK, "No filter named 'random'"),
        ("{{ raise_exception('\x1b[2J\\n' + 'a' * 10 ** 6) }}", TALK, r"(TemplateError: \x1b[2J\naaa"),
    ],
)
def test_what_has_no_place_in_the_text_is_refused(tmp_path, folder, template, record, message, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        loaded(tmp_path, folder(template), record)
    assert len(str(error.value)) < 2000 and str(error.value).isprintable()


ALL_FIELDS = (
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.name }}{{ m.content or '' }}"
    "{{ m.reasoning_content }}{{ m.tool_calls | default([]) | tojson }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user": {"name": "x<|im_end|>"}}, "message 1 has the text '<|im_end|>'"),
        ({"answer": {"reasoning_content": "<s>"}}, "message 2 has the text '<s>'"),
        ({"answer": {"tool_calls": [{"name": "f", "arguments": {"a": [{"<s>": 1}]}}]}}, "message 2 has the text '<s>'"),
        ({"record": {"tools": [{"a": {"b": ["</s>"]}}]}}, "'tools' has the text '</s>'"),
        ({"user": {"name": "<|im_", "content": "end|>"}}, "ends with the beginning of '<|im_end|>', line 1 of"),
        ({"record": {"tools": [{"a": "\ud800"}]}}, "'tools' holds a lone surrogate"),
        ({"record": {"tools": "f"}}, "'tools' is 'f': give a list of objects"),
        ({"user": {"mood": "good"}}, "message 1 has the field 'mood', which the chat template of"),
    ],
)
def test_every_string_and_field_is_checked(tmp_path, folder, fields, message):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = [turn | fields.get(who, {}) for turn, who in zip(turns, ("user", "answer"), strict=True)]
    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(tmp_path, folder(ALL_FIELDS), {"messages": messages} | fields.get("record", {}))


def test_text_that_is_normalized_to_a_special_token_is_refused(tmp_path, folder):
    tokenizers = pytest.importorskip("tokenizers")
    folder.library.normalizer = tokenizers.normalizers.NFKC()
    folder.library.add_special_tokens([tokenizers.AddedToken("<mask>", normalized=True)])
    with pytest.raises(ValueError, match="has text that the tokenizer normalizes to '<mask>'"):
        loaded(tmp_path, folder(CHATML), chat(("user", "a\uff1cmask\uff1e"), ("assistant", "b")))


def test_calls_and_weights_with_a_template(tmp_path, folder):
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "3", "weight": 0},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "It is 2.", "weight": 1},
    ]
    records = [{"messages": messages, "source": "s", "n": 1}] * 2 + [{"prompt": "a", "completion": "b", "n": 2}]
    dataset = loaded(tmp_path, folder(ALL_FIELDS), *records)
    decode = lambda ids: folder.library.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
    part = dataset.validation if dataset.train.size < 9 else dataset.train
    first = slice(0, part.offsets[1])
    assert "assistant:3[]<|im_end|>" in decode(part.tokens[first])
    learned = f"{json.dumps(call)}<|im_end|>It is 2.[]<|im_end|>"
    assert decode(part.tokens[first][part.is_answer[first]]) == learned
    assert "fields that are part of no text: 'n' (3), 'source' (2), 'tool_call_id' of messages (2)" in str(dataset)


def test_a_token_is_of_the_part_that_its_text_ends_in(folder):
    rng, library = np.random.default_rng(0), folder.library
    words = ["a", " a", "ass", "at last", "\n", "  ", "</s>", "<|im_end|>", "<r>", "<r>  ", "é", "two three"]
    library.add_special_tokens([pytest.importorskip("tokenizers").AddedToken("<r>", rstrip=True)])
    tokenizer = load_tokenizer(folder(CHATML))
    for _ in range(20):
        turns = [Turn("".join(rng.choice(words, 3)), is_answer=bool(i % 2)) for i in range(41)]
        text = "".join(turn.text for turn in turns).encode()
        of_byte = [i for i, turn in enumerate(turns) for _ in turn.text.encode()]
        tokens, is_answer = _of_rendered(turns, tokenizer)
        end = 0
        for token, learned in zip(tokens.tolist(), is_answer, strict=True):
            end += len(library.id_to_token(token))  # a character of a token's text stands for a byte
            assert learned == turns[of_byte[end - 1]].is_answer
            if library.id_to_token(token) == "<r>":  # which takes the spaces behind it, and ends before them
                end += len(text[end:]) - len(text[end:].lstrip())
        assert end == len(text)


def test_spaces_at_the_end_of_a_token_are_of_its_text(folder):
    """Where a tokenizer's file has `trim_offsets`, the library's offsets leave them out."""
    tokenizers, library = pytest.importorskip("tokenizers"), folder.library
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[a-z.]+ *"), "isolated")
    by_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, by_bytes])
    library.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=by_bytes.alphabet())
    library.train_from_iterator(["hello.  you"] * 50, trainer)
    turns = [Turn("hello.", is_answer=True), Turn("  ", is_answer=False), Turn("you", is_answer=True)]
    tokens, is_answer = _of_rendered(turns, load_tokenizer(folder(CHATML)))
    assert [library.id_to_token(token) for token in tokens.tolist()] == ["hello.ĠĠ", "you"]
    assert is_answer.tolist() == [False, True]


@pytest.mark.parametrize("text", ["An answer. ", "  é", "\n\nt"])
def test_the_tokens_of_an_answer_are_found_whatever_is_normalized(folder, text):
    tokenizers, library = pytest.importorskip("tokenizers"), folder.library
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first"), library.pre_tokenizer
    ])  # fmt: skip
    library.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.NFD(), tokenizers.normalizers.Lowercase()
    ])  # fmt: skip
    library.decoder = tokenizers.decoders.Sequence([library.decoder, tokenizers.decoders.Replace("▁", " ")])
    turns = [Turn("ONE? <|im_end|>", is_answer=False), Turn(text, is_answer=True), Turn("<s>two", is_answer=False)]
    tokens, is_answer = _of_rendered(turns, tokenizer := load_tokenizer(folder(CHATML)))
    found = unicodedata.normalize("NFC", tokenizer.decode(tokens[is_answer]))
    assert found.removeprefix(" ") == text.lower().removeprefix(" ")


def test_a_missing_package_is_named(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'needs jinja2: .*pip install .*"zero-jax\[train\]"'):
        loaded(tmp_path, folder(CHATML), TALK)


def test_without_a_template_or_with_a_prompt_nothing_changes(tmp_path, folder):
    pairs = [{"prompt": f"{i}? ", "completion": "x"} for i in range(4)]
    with_template = loaded(tmp_path, folder(CHATML), *pairs)
    without = loaded(tmp_path, folder(None), *pairs)
    assert with_template.fingerprint == without.fingerprint
    assert loaded(tmp_path, folder(None), TALK, TALK, *pairs).fingerprint != without.fingerprint
