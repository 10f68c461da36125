"""Chat templates: text and tokens as transformers makes them, answers found in them, and what has no place refused."""

import json
import re
import sys

import numpy as np
import pytest
from test_conversations import chat, written

from zero_jax.data import DataConfig, load_dataset

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
    ],
)
def test_what_has_no_place_in_the_text_is_refused(tmp_path, folder, template, record, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(tmp_path, folder(template), record)


def test_a_missing_package_is_named(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'needs jinja2: pip install "zero-jax\[train\]"'):
        loaded(tmp_path, folder(CHATML), TALK)


def test_without_a_template_or_with_a_prompt_nothing_changes(tmp_path, folder):
    pairs = [{"prompt": f"{i}? ", "completion": "x"} for i in range(4)]
    with_template = loaded(tmp_path, folder(CHATML), *pairs)
    without = loaded(tmp_path, folder(None), *pairs)
    assert with_template.fingerprint == without.fingerprint
    assert loaded(tmp_path, folder(None), TALK, TALK, *pairs).fingerprint != without.fingerprint
