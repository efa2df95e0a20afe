"""The tokenizer's files, chat templates in the sandbox, and what is refused."""

import json
import sys
import time

import pytest
import transformers
from helpers.vocabularies import byte_level, sentencepiece_like
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.loading import chat_template
from minivllm.loading.chat_template import render_chat_template
from minivllm.loading.tokenizer import Tokenizer

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
        "{{ lipsum(n=10**9) }}",
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


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "a loop that writes": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }} and {{ b }}{% endfor %}"
    "{% endfor %}",
    "a filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% set s = [1] * 9 %}{% for a in s recursive %}"
    "{% if loop.depth < 90 %}{{ loop(s) }}{% endif %}"
    "{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}"
    "{% set x = f(n - 1) %}{% endif %}"
    "{% endmacro %}{{ f(90) }}",
    "a macro with a caller": "{% macro f(n) %}{% if n %}{{ caller(n) }}{{ caller(n) }}{% endif %}{% endmacro %}"
    "{% macro g(n) %}{% call(m) f(n) %}{{ g(m - 1) }}{% endcall %}{% endmacro %}{{ g(30) }}",
    "filters": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = [b] | map('string') | list | join %}"
    "{% endfor %}{% endfor %}",
    "products": "{{ range(99999) | map('string') | map('replace', '', 'x' * 9999) | list | length }}",
}
LARGE = {
    "output": "{% set x = 'x' * 99999 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "times": "{{ 'x' * 10**12 }}",
    "times, the other way": "{{ 10**12 * [1] }}",
    "plus": "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tilde": "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "replace": "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x.replace('x', 'xx') %}"
    "{% endfor %}",
    "the filter replace": "{% set ns = namespace(x='x') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x | replace('x', 'xx') %}{% endfor %}",
    "format": "{% set ns = namespace(x='x') %}{% for a in range(60) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "join": "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "lists": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='x') %}{% for a in range(60) %}"
    "{% set ns.x = f(ns.x) %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a power of a power": "{% set ns = namespace(x=7) %}{% for a in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "values that are kept": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}"
    "{% set ns.x = ns.x + ['x' * 9999999] %}{% endfor %}",
    "a macro that writes": "{% macro f(x) %}{% for a in range(99999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{{ f('x' * 9999999) }}",
    "the template itself": "x" * (10**6 + 1),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_runs_for_ever_is_stopped(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "MAX_CHARS", 10**12)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"chat template failed on these messages: it ran for more than 0\.3 s"):
        render_chat_template(ENDLESS[name], messages=USER)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_makes_much_of_little_is_stopped(name):
    start = time.monotonic()
    message = "chat template failed on these messages: it (made|has|calculated with) .*(more than|the most is) "
    with pytest.raises(ValueError, match=message):
        render_chat_template(LARGE[name], messages=USER)
    assert time.monotonic() - start < 4, "stopped by its size, not by the clock"


def test_what_a_template_says_can_be_printed():
    with pytest.raises(ValueError, match=r"messages: \\x1b\[2J\\u202e") as error:
        render_chat_template("{{ raise_exception('\x1b[2J\u202e') }}", messages=USER)
    assert str(error.value).isprintable()


def test_expressions_mean_what_they_did():
    """The limits do not change what operators do."""
    template = (
        "{{ 'a' ~ 1 ~ none ~ nothing }}|{{ 2 ** 10 }}|{{ 2 ** -1 }}|{{ 2 ** 0.5 > 1.41 }}|{{ 'ab' * 2 }}|{{ 2 * [1] }}"
        "|{{ '%s-%03d' % ('x', 7) }}|{{ 7 % 4 }}|{{ [1] + [2] }}|{{ 'a' + 'b' }}|{{ true * 3 }}"
        "|{% for x in 'abc' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}"
        "|{% for x in [] %}x{% else %}none{% endfor %}|{{ [3, 1, 2] | sort | map('string') | join(',') }}"
        "|{{ {'b': 1, 'a': 2} | dictsort }}|{{ messages | map(attribute='role') | list }}|{{ '  x ' | trim | upper }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render_chat_template(template, messages=USER) == plain.from_string(template).render(messages=USER)


# --- What the library fails on ---------------------------------------------------------------------------------------


def spoil(folder, **changes):
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer.json", **changes)


def test_a_tokenizer_that_panics_when_it_is_read(tmp_path):
    """Rust panics are no Exceptions; they come out as ValueErrors all the same."""
    spoil(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/tokenizer\.json is damaged or not a tokenizer: .*Get tokenizer\.js"
    ):
        Tokenizer.from_folder(tmp_path)


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}), "hello"),
        (dict(pre_tokenizer=BACKTRACKING), "a" * 40 + "b"),
        (dict(model={"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                     "max_input_chars_per_word": 100, "vocab": {"x": 0}}, added_tokens=[]), "hello"),
    ],
    ids=["empty replace", "backtracking", "no unknown token"],
)  # fmt: skip
def test_a_tokenizer_that_fails_on_a_text(changes, text, tmp_path):
    spoil(tmp_path, **changes)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/tokenizer\.json fails on this text: .*Get tokenizer\.json again"
    ):
        tokenizer.encode(text)


def test_a_tokenizer_that_fails_on_token_ids(tmp_path):
    spoil(tmp_path, decoder={"type": "Strip", "content": "x", "start": 0, "stop": 10**9})
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/tokenizer\.json fails on these token ids: .*Get tokenizer\.json"
    ):
        tokenizer.decode(tokenizer.encode("x"))


def test_an_interrupt_is_no_failure_of_the_library(monkeypatch):
    class Interrupted:
        def encode(self, *args, **options):
            raise KeyboardInterrupt

    tokenizer = byte_level()
    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


@pytest.mark.parametrize("vocabulary", [byte_level, sentencepiece_like])
def test_a_text_that_cannot_fit_is_refused_before_tokenizing(vocabulary):
    tokenizer = vocabulary()
    longest = tokenizer.longest_token_chars
    assert longest == max(len(tokenizer._backend.id_to_token(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.encode("fox " * 10, max_tokens=100) == tokenizer.encode("fox " * 10)
    assert tokenizer.encode("x" * 10 * longest, max_tokens=10) == tokenizer.encode("x" * 10 * longest)
    text = "fox " * 5_000_000
    start = time.process_time()
    message = (
        rf"has 20,000,000 characters, and 10 tokens hold at most {10 * longest} \(the longest token has {longest}\)"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(text, max_tokens=10)
    assert time.process_time() - start < 0.5


def test_a_special_token_that_is_no_text(folder):
    edit(folder / "tokenizer_config.json", eos_token="\ud800")
    with pytest.raises(ValueError, match=rf"^{folder}/tokenizer_config\.json.*'eos_token' .*\\ud800"):
        Tokenizer.from_folder(folder)
