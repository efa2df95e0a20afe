"""The engine's own part: text, stop strings, fan-out, aborts, errors. A scripted executor stands in for the model."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest
import tokenizers
from helpers.engines import GenerationConfig
from helpers.executors import TokenExecutor
from tokenizers import decoders, models, pre_tokenizers

from minivllm.engine.args import EngineArgs, build_engine
from minivllm.engine.output_processor import first_stop_string
from minivllm.executor.base import Logprob, ModelOutput
from minivllm.loading.tokenizer import Tokenizer
from minivllm.sampling_params import SamplingParams

EOS, EOS_2 = 256, 257
WORDS = {"Paris": 258, "the capital": 259}


def byte_tokenizer() -> Tokenizer:
    """One token per byte, two words of several bytes and two end tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<eos2>"])
    backend.add_tokens(list(WORDS))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    return Tokenizer(backend, {"eos_token": "<eos>"}, template)


TOKENIZER = byte_tokenizer()


class ScriptedExecutor(TokenExecutor):
    """Gives each request its tokens from a script {request id: token ids}; after that, and else, the byte '.'."""

    def __init__(self, script: dict[str, list[int]] | None = None) -> None:
        super().__init__(self.scripted)
        self.script = script or {}
        self.fail_at: dict[int, BaseException] = {}
        self.calls = 0
        self.reports: dict[str, bool] = {}  # request id -> does it want logprobs

    def scripted(self, request_id: str, j: int) -> int:
        tokens = self.script.get(request_id, [])
        return tokens[j] if j < len(tokens) else TOKENIZER.encode(".")[0]

    def execute(self, scheduler_output) -> ModelOutput:
        self.calls += 1
        if self.calls in self.fail_at:
            raise self.fail_at[self.calls]
        for request in scheduler_output.new_requests:
            self.reports[request.request_id] = request.sampling_params.logprobs is not None
        sampled = self.sample(scheduler_output)
        logprobs = {
            request_id: [{token: Logprob(-1.0, 1)} for token in tokens]
            for request_id, tokens in zip(scheduler_output.num_scheduled_tokens, sampled, strict=True)
            if self.reports[request_id]
        }
        return ModelOutput(sampled, logprobs)


def make(script=None, eos=(EOS, EOS_2), tokenizer=TOKENIZER, max_model_len=64, num_blocks=64, **settings):
    generation = settings.pop("generation_config", GenerationConfig(eos_token_ids=eos))
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "block_size": 4, **settings}
    args = EngineArgs(max_model_len=max_model_len, num_gpu_blocks_override=num_blocks, **settings)
    return build_engine(
        args,
        executor=ScriptedExecutor(script),
        vocab_size=260,
        tokenizer=tokenizer,
        generation_config=generation,
    )


def finish(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        engine.scheduler.kv_cache_manager.check_invariants()
    return outputs


def generate(text: str | list[int], prompt="Hi", **params):
    """Run one request whose output is scripted; the CompletionOutput."""
    tokens = TOKENIZER.encode(text) if isinstance(text, str) else text
    engine = make({"a": tokens})
    engine.add_request("a", prompt, SamplingParams(**{"max_tokens": 30, "temperature": 0, **params}))
    return finish(engine)["a"].outputs[0]


def is_idle(engine) -> bool:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return (
        pool.num_free_blocks == pool.num_usable_blocks
        and not engine.output_processor.states
        and not engine.output_processor.parents
    )


class TestEnds:
    def test_length(self):
        out = generate("hello", max_tokens=3)
        assert (out.text, out.finish_reason, out.stop_reason) == ("hel", "length", None)

    def test_default_is_sixteen_tokens(self):
        engine = make()
        engine.add_request("a", "Hi", SamplingParams())
        assert len(finish(engine)["a"].outputs[0].token_ids) == 16

    def test_max_tokens_none_goes_to_max_model_len(self):
        engine = make()
        engine.add_request("a", "Hi", SamplingParams(max_tokens=None))
        out = finish(engine)["a"]
        assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == 64

    def test_eos_is_a_token_but_no_text(self):
        out = generate([*TOKENIZER.encode("ab"), EOS])
        assert (out.text, out.token_ids[-1], out.finish_reason, out.stop_reason) == ("ab", EOS, "stop", None)

    def test_a_second_eos_stops_and_is_named(self):
        out = generate([*TOKENIZER.encode("ab"), EOS_2])
        assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", EOS_2)

    def test_ignore_eos_ignores_all_of_them(self):
        out = generate([EOS, EOS_2, *TOKENIZER.encode("ab")], ignore_eos=True, max_tokens=4)
        assert (out.text, out.finish_reason) == ("ab", "length")
        shown = generate([EOS, *TOKENIZER.encode("ab")], ignore_eos=True, max_tokens=3, skip_special_tokens=False)
        assert shown.text == "<eos>ab"

    def test_stop_token_id(self):
        out = generate("abc", stop_token_ids=TOKENIZER.encode("b"))
        assert (out.text, out.stop_reason) == ("a", TOKENIZER.encode("b")[0])
        assert generate("abc", stop_token_ids=TOKENIZER.encode("b"), include_stop_str_in_output=True).text == "ab"


class TestStopStrings:
    def test_within_one_token(self):
        out = generate([*TOKENIZER.encode("x"), WORDS["the capital"]], stop="cap")
        assert (out.text, out.finish_reason, out.stop_reason) == ("xthe ", "stop", "cap")

    def test_across_token_boundaries(self):
        out = generate("one two three", stop=["o th"])
        assert (out.text, out.stop_reason) == ("one tw", "o th")

    def test_included(self):
        assert generate("one two", stop=["e t"], include_stop_str_in_output=True).text == "one t"

    def test_the_first_to_end_wins(self):
        out = generate([WORDS["the capital"]], stop=["capital", "he"])
        assert (out.text, out.stop_reason) == ("t", "he")

    def test_it_may_not_begin_in_the_prompt(self):
        assert generate("lo there", prompt="hel", stop=["hello"]).text.startswith("lo there")

    def test_min_tokens_postpones_the_check(self):
        out = generate("ab ab ab", stop=["b"], min_tokens=3)
        assert out.text == "ab a"

    def test_at_the_last_token_it_beats_length(self):
        out = generate("abc", stop=["c"], max_tokens=3)
        assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", "c")

    def test_non_ascii_across_bytes(self):
        assert generate("naïve café!", stop=["é"]).text == "naïve caf"

    def test_streaming_holds_back_what_a_stop_string_could_take(self):
        engine = make({"stream-0": TOKENIZER.encode("abc STOP def")})
        pieces = list(engine.stream("Hi", SamplingParams(stop=["STOP"], max_tokens=12)))
        assert "".join(pieces) == "abc " and all("S" not in piece for piece in pieces)
        engine = make({"stream-0": TOKENIZER.encode("abc STO")})
        assert "".join(engine.stream("Hi", SamplingParams(stop=["STOP"], max_tokens=7))) == "abc STO"

    def test_first_stop_string(self):
        assert first_stop_string("abcabc", 3, ["c"]) == ("c", 6)
        assert first_stop_string("abcabc", 3, ["ca"]) == ("ca", 4)
        assert first_stop_string("abcabc", 6, ["c"]) is None
        assert first_stop_string("", 0, ["c"]) is None


class TestText:
    def test_streaming_never_shows_half_a_character(self):
        text = "é 東京 👩‍👩‍👧 ok"
        engine = make({"stream-0": TOKENIZER.encode(text)})
        pieces = list(engine.stream("Hi", SamplingParams(max_tokens=len(TOKENIZER.encode(text)))))
        assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)

    def test_outputs_are_cumulative_and_finish_once(self):
        engine = make({"a": TOKENIZER.encode("abc")})
        engine.add_request("a", "Hi", SamplingParams(max_tokens=3, logprobs=0))
        seen = [engine.step()[0] for _ in range(3)]
        assert [o.outputs[0].text for o in seen] == ["a", "ab", "abc"]
        assert [len(o.outputs[0].token_ids) for o in seen] == [1, 2, 3]  # each output keeps its own list
        assert [len(o.outputs[0].logprobs) for o in seen] == [1, 2, 3]
        assert [o.finished for o in seen] == [False, False, True]
        assert is_idle(engine) and engine.step() == []

    def test_without_streaming_only_the_end_is_returned(self):
        engine = make()
        engine.add_request("a", "Hi", SamplingParams(max_tokens=3), output_kind="final_only")
        assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]

    def test_without_a_tokenizer_tokens_are_all_there_is(self):
        engine = make({"a": [5, 6]}, tokenizer=None)
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
        out = finish(engine)["a"]
        assert (out.prompt, out.outputs[0].text, out.outputs[0].token_ids) == (None, "", [5, 6])

    def test_leaving_a_stream_early_aborts_it(self):
        engine = make()
        for _ in engine.stream("Hi", SamplingParams(max_tokens=30)):
            break
        assert is_idle(engine)

    def test_streams_and_other_requests_share_the_steps(self):
        engine = make()
        engine.add_request("a", "Hi", SamplingParams(max_tokens=30))
        stream = engine.stream("Ho", SamplingParams(max_tokens=5))
        assert len("".join(stream)) == 5
        assert engine.output_processor.states["a"].progress.num_tokens == 5

    def test_streams_side_by_side_lose_nothing(self):
        engine = make({"stream-0": TOKENIZER.encode("abc"), "stream-1": TOKENIZER.encode("defghi")})
        short = engine.stream("Hi", SamplingParams(max_tokens=3))
        long = engine.stream("Ho", SamplingParams(max_tokens=6))
        pieces = [next(short), next(long)]
        rest = list(long)  # runs every step that is left, also those of the other stream
        assert pieces[1] + "".join(rest) == "defghi"
        assert pieces[0] + "".join(short) == "abc"
        assert is_idle(engine)

    def test_a_stream_says_so_when_another_caller_s_step_failed(self):
        engine = make()
        first, second = engine.stream("Hi", SamplingParams()), engine.stream("Ho", SamplingParams())
        next(first), next(second)
        engine.executor.fail_at[engine.executor.calls + 1] = RuntimeError("device lost")
        with pytest.raises(RuntimeError, match="device lost"):
            list(first)
        with pytest.raises(RuntimeError, match="ended by an error in a forward pass that another caller ran"):
            list(second)
        assert is_idle(engine)


class TestFanOut:
    def test_children_share_the_full_blocks_of_the_prompt(self):
        engine = make()
        engine.add_request("a", list(range(10)), SamplingParams(n=3, max_tokens=2))
        out = finish(engine)["a"]
        assert [c.index for c in out.outputs] == [0, 1, 2] and out.finished
        assert engine.event_log[0].hits == {"0_a": 0, "1_a": 8, "2_a": 8}
        # The half-full third block is not shared, and nothing is copied: each child computes its own.
        assert engine.event_log[0].new_blocks == {"0_a": [1, 2, 3], "1_a": [1, 2, 4], "2_a": [1, 2, 5]}
        assert engine.event_log[0].scheduled == {"0_a": 10, "1_a": 2, "2_a": 2}

    def test_nothing_is_shared_without_prefix_caching(self):
        engine = make(enable_prefix_caching=False)
        engine.add_request("a", list(range(10)), SamplingParams(n=2, max_tokens=2))
        finish(engine)
        assert engine.event_log[0].scheduled == {"0_a": 10, "1_a": 10}

    def test_seeds_are_seed_plus_index(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams(n=3, seed=5))
        assert [s.request.sampling_params.seed for s in engine.output_processor.parents["a"].children] == [5, 6, 7]

    def test_unseeded_requests_differ_and_the_engine_s_seed_repeats_them(self):
        def seeds(engine):
            for name in "ab":
                engine.add_request(name, [1], SamplingParams())
            return [
                s.request.sampling_params.seed for p in engine.output_processor.parents.values() for s in p.children
            ]

        first = seeds(make())
        assert len(set(first)) == 2 and seeds(make()) == first
        other = make()
        other.input_processor.seed = 1
        assert not set(seeds(other)) & set(first)

    def test_the_caller_s_params_are_left_alone(self):
        params = SamplingParams(n=2)
        before = dataclasses.asdict(params)
        engine = make()
        engine.add_request("a", [1], params)
        assert dataclasses.asdict(params) == before

    def test_abort_ends_every_child(self):
        engine = make({"0_a": [EOS]})
        engine.add_request("a", [1], SamplingParams(n=3))
        engine.step()
        (out,) = engine.abort_request("a")
        assert [c.finish_reason for c in out.outputs] == ["stop", "abort", "abort"]
        assert is_idle(engine)


class TestDefaults:
    def test_generation_config_gives_the_defaults(self):
        config = GenerationConfig(eos_token_ids=(EOS,), temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=5)
        params = make(generation_config=config).input_processor.default_sampling_params()
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.9, 5)

    def test_without_one_they_are_vllm_s(self):
        assert make().input_processor.default_sampling_params() == SamplingParams()

    def test_metrics(self):
        times = iter(range(100))
        engine = make()
        engine.engine_core.clock = lambda: float(next(times))
        engine.add_request("a", "Hi", SamplingParams(max_tokens=2))  # arrives at 0
        metrics = finish(engine)["a"].metrics  # step 1: 1 to 2; step 2: 3 to 4
        assert (metrics.arrival_time, metrics.first_scheduled_time) == (0.0, 1.0)
        assert (metrics.first_token_time, metrics.last_token_time) == (2.0, 4.0)
        assert metrics.time_to_first_token == 2.0 and metrics.num_preemptions == 0

    def test_event_log_to_pandas(self):
        engine = make()
        assert engine.event_log.to_pandas().empty
        engine.add_request("a", list(range(9)), SamplingParams(max_tokens=3))
        finish(engine)
        table = engine.event_log.to_pandas()
        assert table["tokens"].tolist() == [9, 1, 1] and table["finished"].tolist() == [0, 0, 1]
        assert table["new_blocks"].tolist() == [3, 0, 0] and table["free_blocks"].tolist() == [60, 60, 60]
        assert table["running"].tolist() == [1, 1, 1] and table.index.name == "step"


def changed(params, **values):
    """Set fields after the checks of the constructor."""
    for name, value in values.items():
        setattr(params, name, value)
    return params


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty; it needs at least one token"),
            ([], "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ([0, 260], "token id 260 is out of range: the vocabulary has ids 0 to 259"),
            ([-1], "token id -1 is out of range"),
            ([1.5], "must hold whole numbers, got 1.5"),
            (["a"], "must hold whole numbers, got 'a'"),
            ([True], "token id True is out of range"),
            ([None], "must hold whole numbers, got None"),
            (b"abc", "a prompt is text, a list of token ids, or a dict of either; got bytes"),
            (7, "a prompt is text, a list of token ids, or a dict of either; got int"),
            ({"text": "x"}, r"needs 'prompt' or 'prompt_token_ids', and may have 'cache_salt'; got \['text'\]"),
            ({"prompt": "x", "salt": "y"}, "needs 'prompt' or 'prompt_token_ids'"),
            ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a non-empty string of valid Unicode, got ''"),
            ({"prompt": "x", "cache_salt": 3}, "cache_salt must be a non-empty string of valid Unicode, got 3"),
            ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt must be a non-empty string of valid Unicode"),
            ({"prompt": [1, 2]}, "'prompt' must be text, got list; use 'prompt_token_ids' for token ids"),
            ({1, 2}, "a prompt is text, a list of token ids, or a dict of either; got set"),
            ([1] * 64, r"has 64 tokens, but max_model_len is 64, .* Shorten the prompt to 63 tokens"),
        ],
    )
    def test_prompts(self, prompt, message):
        engine = make()
        with pytest.raises(ValueError, match=message):
            engine.add_request("a", prompt, SamplingParams())
        assert is_idle(engine) and not engine.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (SamplingParams(stop_token_ids=[260]), "stop_token_ids names token 260; the vocabulary has ids 0 to 259"),
            (SamplingParams(logit_bias={-1: 1.0}), "logit_bias names token -1"),
            (SamplingParams(logprobs=261), "logprobs=261 is more than the vocabulary's 260 tokens; -1 means all"),
            ({"max_tokens": 3}, "sampling_params must be a SamplingParams, got dict"),
            (changed(SamplingParams(), n=0), "n must be a whole number of at least 1, got 0"),
        ],
    )
    def test_params(self, params, message):
        engine = make()
        with pytest.raises(ValueError, match=message):
            engine.add_request("a", [1], params)
        assert is_idle(engine)

    def test_priority_needs_its_policy(self):
        with pytest.raises(ValueError, match="priority=1 has no effect under scheduling_policy='fcfs'"):
            make().add_request("a", [1], SamplingParams(), priority=1)
        with pytest.raises(ValueError, match="priority must be a whole number"):
            make(scheduling_policy="priority").add_request("a", [1], SamplingParams(), priority=1.5)

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_arrival_time(self, policy):
        engine = make(scheduling_policy=policy)
        engine.add_request("a", [1], SamplingParams())
        with pytest.raises(ValueError, match="arrival_time must be a number of seconds on the engine's clock, got 'x'"):
            engine.add_request("b", [1], SamplingParams(), arrival_time="x")
        finish(engine)
        assert is_idle(engine)

    def test_output_kind(self):
        with pytest.raises(ValueError, match="must be one of cumulative, final_only, taken, none, got 'final'"):
            make().add_request("a", [1], SamplingParams(), output_kind="final")

    @pytest.mark.parametrize("ids", [None, 5, b"a"])
    def test_abort_of_what_is_no_id(self, ids):
        with pytest.raises(ValueError, match="abort_request takes a request id or several"):
            make().abort_request(ids)

    def test_request_larger_than_the_pool(self):
        engine = make(num_blocks=9)
        with pytest.raises(ValueError, match=r"can grow to 42 tokens and then needs 11 KV blocks of 4, .* 8 usable"):
            engine.add_request("a", [1, 2], SamplingParams(max_tokens=40))
        with pytest.raises(ValueError, match="'0_b' can grow to 42"):
            engine.add_request("b", [1, 2], SamplingParams(max_tokens=40, n=2))
        assert is_idle(engine)

    def test_duplicate_ids(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams())
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            engine.add_request("a", [1], SamplingParams())
        engine.add_request("1_b", [1], SamplingParams())
        with pytest.raises(ValueError, match="request id '1_b' is in use"):
            engine.add_request("b", [1], SamplingParams(n=2))  # its second child would be 1_b
        assert set(engine.output_processor.parents) == {"a", "1_b"}
        finish(engine)
        engine.add_request("a", [1], SamplingParams())  # ended: the id is free again

    def test_without_a_tokenizer(self):
        engine = make(tokenizer=None)
        with pytest.raises(ValueError, match="no tokenizer, so a prompt must be token ids"):
            engine.add_request("a", "text", SamplingParams())
        with pytest.raises(ValueError, match=r"stop strings need text, .* Use stop_token_ids"):
            engine.add_request("a", [1], SamplingParams(stop="x"))

    def test_stream_of_several(self):
        with pytest.raises(ValueError, match=r"stream yields one text, but sampling_params.n is 2"):
            next(make().stream("Hi", SamplingParams(n=2)))

    def test_one_refusal_leaves_the_others_running(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams(max_tokens=4))
        engine.step()
        with pytest.raises(ValueError, match="empty"):
            engine.add_request("b", [], SamplingParams())
        assert len(finish(engine)["a"].outputs[0].token_ids) == 4


class TestSharedEngine:
    """Several callers, one engine: outputs reach whom they belong to, and steps do not overlap."""

    def test_outputs_that_were_kept_come_with_the_next_step(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams(max_tokens=1))
        engine.keep(engine.step())
        engine.add_request("b", [1], SamplingParams(max_tokens=1))
        assert [output.request_id for output in engine.step()] == ["a", "b"]
        assert engine.step() == []

    def test_a_stream_leaves_other_outputs_to_their_owner(self):
        engine = make()
        engine.add_request("mine", [1], SamplingParams(max_tokens=2), output_kind="final_only")
        list(engine.stream("Hi", SamplingParams(max_tokens=8)))
        (output,) = engine.step()
        assert output.request_id == "mine" and output.finished

    def test_a_step_within_a_step_is_refused_and_leaves_the_outer_one_alone(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams(max_tokens=1))
        execute, refused = engine.executor.execute, []

        def nested(output):
            with pytest.raises(RuntimeError, match="a step of this engine is in progress"):
                engine.step()
            refused.append(True)
            return execute(output)

        engine.executor.execute = nested
        assert engine.step()[0].finished and refused

    def test_an_abort_during_a_step_takes_effect_after_it(self):
        engine = make()
        for name in "ab":
            engine.add_request(name, [1], SamplingParams(max_tokens=4))
        execute = engine.executor.execute

        def aborting(output):
            assert engine.abort_request("a") == []
            return execute(output)

        engine.executor.execute = aborting
        assert {output.request_id for output in engine.step()} == {"a", "b"}
        engine.executor.execute = execute
        assert set(engine.output_processor.parents) == {"b"}
        finish(engine)
        assert is_idle(engine)

    def test_aborting_many_does_not_search_the_queue_for_each(self, monkeypatch):
        engine = make()
        for i in range(50):
            engine.add_request(str(i), [1], SamplingParams())
        calls = []
        leave = engine.scheduler._leave_queues
        monkeypatch.setattr(engine.scheduler, "_leave_queues", lambda requests: (calls.append(1), leave(requests)))
        assert len(engine.abort_request([str(i) for i in range(50)])) == 50
        assert len(calls) == 1 and is_idle(engine)


class TestFailures:
    def test_an_error_inside_schedule_loses_no_tokens_of_the_others(self, monkeypatch):
        engine = make()
        expected = {}
        for name in "ac":
            engine.add_request(name, list(range(7)), SamplingParams(max_tokens=12))
        engine.step()
        kv = engine.scheduler.kv_cache_manager
        lookup = kv.get_computed_blocks
        monkeypatch.setattr(kv, "get_computed_blocks", lambda request: 1 / 0)
        engine.add_request("b", [1], SamplingParams(max_tokens=2))
        with pytest.raises(ZeroDivisionError):
            engine.step()  # a and c have been given a block each when b's look-up fails
        monkeypatch.setattr(kv, "get_computed_blocks", lookup)
        kv.check_invariants()
        assert not kv.block_tables and [r.request_id for r in engine.scheduler.waiting] == ["a", "c", "b"]
        expected = finish(engine)
        assert {name: len(out.outputs[0].token_ids) for name, out in expected.items()} == {"a": 12, "b": 2, "c": 12}
        assert expected["a"].metrics.num_preemptions == 1 and is_idle(engine)

    def test_an_executor_that_returns_too_few_tokens(self):
        engine = make({"a": [EOS]})
        for name in "ab":
            engine.add_request(name, [1], SamplingParams())
        execute = engine.executor.execute
        engine.executor.execute = lambda output: ModelOutput(execute(output).sampled_token_ids[:1])
        with pytest.raises(ValueError, match="the executor returned 1 tokens for 2 requests"):
            engine.step()
        assert is_idle(engine) and not engine.scheduler.running

    def test_ctrl_c_while_a_request_is_added_to_a_stream(self, monkeypatch):
        engine = make()
        add = engine.scheduler.add_request
        monkeypatch.setattr(
            engine.scheduler, "add_request", lambda request: (os.kill(os.getpid(), signal.SIGINT), add(request))
        )
        with pytest.raises(KeyboardInterrupt):
            next(engine.stream("Hi", SamplingParams()))
        assert is_idle(engine)

    def test_ctrl_c_at_the_end_of_a_step_keeps_its_outputs_for_the_next(self):
        engine = make()
        engine.add_request("a", [1], SamplingParams(max_tokens=1))
        log = engine.engine_core._log

        def interrupted(*args):
            os.kill(os.getpid(), signal.SIGINT)
            log(*args)

        engine.engine_core._log = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.engine_core._log = log
        (output,) = engine.step()
        assert output.request_id == "a" and output.finished and is_idle(engine)

    def test_a_failing_forward_pass_ends_its_requests_and_leaves_the_engine_usable(self):
        engine = make(max_num_seqs=2)
        for name in "abc":
            engine.add_request(name, list(range(9)), SamplingParams(max_tokens=4))
        engine.step()
        engine.executor.fail_at[2] = RuntimeError("device lost")
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        engine.scheduler.kv_cache_manager.check_invariants()
        assert set(engine.output_processor.parents) == {"c"}  # it was not in the step
        assert len(finish(engine)["c"].outputs[0].token_ids) == 4
        assert is_idle(engine)

    def test_blocks_that_the_failed_pass_should_have_filled_cannot_be_hit(self):
        engine = make()
        engine.executor.fail_at[1] = RuntimeError("device lost")
        engine.add_request("a", list(range(9)), SamplingParams())
        with pytest.raises(RuntimeError):
            engine.step()
        assert is_idle(engine)
        engine.add_request("b", list(range(9)), SamplingParams(max_tokens=1))
        assert finish(engine)["b"].num_cached_tokens == 0

    def test_siblings_of_a_failed_child_end_with_it(self):
        engine = make(max_num_seqs=2)
        engine.executor.fail_at[1] = RuntimeError("device lost")
        engine.add_request("a", [1, 2], SamplingParams(n=4))
        with pytest.raises(RuntimeError):
            engine.step()
        assert is_idle(engine) and not engine.has_unfinished_requests()

    def test_ctrl_c_in_a_forward_pass(self):
        engine = make()
        engine.add_request("a", list(range(9)), SamplingParams())
        execute = engine.executor.execute

        def interrupted(output):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            return execute(output)

        engine.executor.execute = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.executor.execute = execute
        assert engine.has_request("a")  # nobody is ended by somebody's Ctrl-C
        engine.abort_request("a")
        assert is_idle(engine)
        engine.add_request("b", list(range(9)), SamplingParams(max_tokens=2))
        assert finish(engine)["b"].num_cached_tokens == 0

    @pytest.mark.parametrize("method", ["schedule", "update_from_output"])
    def test_ctrl_c_while_the_scheduler_works_loses_nothing(self, method):
        script = {"a": [5, 6, 7, 8]}
        engine = make(script)
        engine.add_request("a", list(range(9)), SamplingParams(max_tokens=4))
        original = getattr(engine.scheduler, method)

        def interrupted(*args):
            original(*args)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

        setattr(engine.scheduler, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        setattr(engine.scheduler, method, original)
        engine.scheduler.kv_cache_manager.check_invariants()
        assert finish(engine)["a"].outputs[0].token_ids == script["a"]
        assert is_idle(engine)

    def test_the_event_log_tells_of_failed_steps_and_aborts(self):
        engine = make(max_num_seqs=2)
        for name in "abc":
            engine.add_request(name, [1, 2], SamplingParams(max_tokens=4))
        engine.executor.fail_at[1] = RuntimeError("device lost")
        with pytest.raises(RuntimeError):
            engine.step()
        engine.add_request("d", [1, 2], SamplingParams(max_tokens=4))
        engine.abort_request("c")
        finish(engine)
        log = [(list(e.scheduled), e.finished, e.aborted) for e in engine.event_log]
        assert log[:2] == [(["a", "b"], ["a", "b"], []), (["d"], [], ["c"])]

    def test_an_error_in_our_own_text_handling_ends_the_step_s_requests_too(self, monkeypatch):
        engine = make({"a": [EOS]})  # a has ended for the scheduler already when the error comes
        for name in "ab":
            engine.add_request(name, [1, 2], SamplingParams())
        monkeypatch.setattr(type(engine.output_processor.states["a"]), "append", lambda self, *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        assert is_idle(engine) and not engine.has_unfinished_requests()
