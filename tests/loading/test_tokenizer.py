"""The tokenizer's files, chat templates in the sandbox, and what is refused."""

import json
import sys

import pytest
import transformers
from helpers.vocabularies import byte_level, sentencepiece_like

from minivllm.loading.tokenizer import Tokenizer, render_chat_template

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(params=[byte_level, sentencepiece_like], ids=["byte_level", "sentencepiece"])
def folder(request, tmp_path):
    """A folder as transformers saves it."""
    tokenizer = request.param()
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    saved.save_pretrained(tmp_path)
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_agrees_with_transformers(folder):
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("", " ", "the quick  fox", "東京 👍🏽", "a<|im_end|>b", "<s>x"):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    expected = theirs.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(USER) == expected
    assert expected.endswith("<|im_start|>assistant\n")


def test_ids_that_are_no_token_decode_to_nothing():
    tokenizer = byte_level()
    ids = tokenizer.encode("fox")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "fox"


def test_older_files(folder):
    """Special tokens as objects and in special_tokens_map.json, the template as a string or a list in the config."""
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    eos = {"content": "</s>", "special": True}
    config.write_text(json.dumps({"eos_token": eos, "chat_template": "old {{ 1 + 1 }}"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.apply_chat_template(USER) == "old 2"
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(config, chat_template=templates)
    assert Tokenizer.from_folder(folder).apply_chat_template(USER) == "plain"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).apply_chat_template(USER) == "file"
    config.unlink()
    (folder / "special_tokens_map.json").unlink()
    bare = Tokenizer.from_folder(folder)
    assert bare.bos_token_id is None and bare.eos_token_id is None


def test_truncation_saved_with_a_tokenizer_is_off(folder):
    backend = Tokenizer.from_folder(folder)._backend
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert 10 < len(Tokenizer.from_folder(folder).encode("the quick brown fox jumps over it 東京")) < 50


def test_damaged_files(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged or not a tokenizer"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "template", [["x"], [{"template": "x"}], [{"name": [], "template": "x"}], 5, {"a": "b"}], ids=str
)
def test_a_chat_template_of_another_form(template, folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json: 'chat_template' is .*; expected a text, or a list of"
    ):
        Tokenizer.from_folder(folder)


def test_a_template_that_is_not_utf_8(folder):
    (folder / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read as UTF-8 text: .* Save it as UTF-8"):
        Tokenizer.from_folder(folder)


def test_only_valid_text_is_encoded():
    tokenizer = byte_level()
    message = r"a lone surrogate \('\\ud800' at index 1\), which is not valid Unicode; read the text as UTF-8"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("a\ud800b")
    for value in (None, 5, b"x", ["x"]):
        with pytest.raises(ValueError, match=f"only a str can be encoded, got {type(value).__name__}"):
            tokenizer.encode(value)


def test_no_chat_template():
    with pytest.raises(ValueError, match=r"has no chat template: it is a base model\. Give a plain text prompt,"):
        byte_level().apply_chat_template(USER)


# --- Chat templates -------------------------------------------------------------------------------------------------

FEATURES = {
    "trimmed blocks": "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}",
    "tojson": "{{ {'a': '<é & \\'>', 'b': [1, none]} | tojson }} {{ messages | tojson(indent=2) }}",
    "tojson options": "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}"
    "{% endif %}{{ i }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
    "namespace": "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "special tokens": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    "tools": "{% if tools %}tools{% elif tools is defined and tools is none %}no tools{% endif %}",
    "string methods": "{{ messages[-1].content.split('i')[0].strip().upper() + messages[0]['role'] | capitalize }}",
    "undefined": "[{{ nothing }}{% if nothing is defined %}x{% endif %}]",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_template_features(feature):
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level()._backend, bos_token="<s>", eos_token="</s>", chat_template=FEATURES[feature]
    )
    ours = Tokenizer(byte_level()._backend, {"bos_token": "<s>", "eos_token": "</s>"}, FEATURES[feature])
    messages = [{"role": "system", "content": "Bé <brief>"}, *USER]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, prompt) == expected


def test_strftime_now():
    year = render_chat_template("{{ strftime_now('%Y') }}")
    assert len(year) == 4 and year.isdigit()


def test_a_template_may_refuse():
    with pytest.raises(ValueError, match="chat template failed on these messages: roles must alternate"):
        render_chat_template("{{ raise_exception('roles must alternate') }}", messages=USER)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",  # syntax
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_faulty_and_hostile_templates(template):
    """Each ends in a ValueError: no attribute tricks, no changed messages, no files, no endless loops."""
    messages = [dict(USER[0])]
    with pytest.raises(ValueError, match="the model's chat template failed on these messages: "):
        render_chat_template(template, messages=messages)
    assert messages == USER


def test_without_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match="pip install jinja2"):
        render_chat_template("x")
