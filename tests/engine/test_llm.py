"""The offline API as a user meets it, on the embedded model."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import torch
from helpers.engines import plain_logits

from minivllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from minivllm.executor import memory
from minivllm.model_config import ModelConfig

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", num_gpu_blocks_override=512)


@pytest.fixture(autouse=True)
def idle_afterwards(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").llm_engine
        engine.scheduler.kv_cache_manager.check_invariants()
        assert (
            not engine.has_unfinished_requests()
            and not engine.output_processor.parents
            and not engine.output_processor.states
        )


def generate(llm, *args, **kwargs):
    return llm.generate(*args, use_tqdm=False, **kwargs)


class TestGenerate:
    def test_one_text(self, llm):
        (out,) = generate(llm, "Once upon a time", GREEDY)
        assert isinstance(out, RequestOutput) and isinstance(out.outputs[0], CompletionOutput)
        assert out.prompt == "Once upon a time" and out.finished
        assert out.prompt_token_ids == llm.tokenizer.encode("Once upon a time")
        assert llm.tokenizer.decode(out.outputs[0].token_ids) == out.outputs[0].text

    def test_all_forms_of_a_prompt_are_the_same_prompt(self, llm):
        text = "Once upon a time"
        ids = llm.tokenizer.encode(text)
        forms = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
        outputs = generate(llm, forms, GREEDY)
        assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1
        assert [out.prompt for out in outputs] == [text, None, None, text, None]
        assert generate(llm, ids, GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text

    def test_numpy_and_torch_integers_are_token_ids(self, llm):
        ids = torch.tensor(llm.tokenizer.encode("Once upon"))
        outputs = generate(llm, [list(ids), list(ids.numpy()), ids.numpy(), ids.tolist()], GREEDY)
        assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1

    def test_order_of_the_outputs_is_that_of_the_prompts(self, llm):
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
        outputs = generate(llm, ["one", "two", "three"], params)
        assert [out.prompt for out in outputs] == ["one", "two", "three"]
        assert [len(out.outputs[0].token_ids) for out in outputs] == [9, 1, 5]

    def test_no_prompts_no_outputs(self, llm):
        assert generate(llm, [], GREEDY) == []

    def test_greedy_tokens_are_the_plain_argmax(self, llm):
        (out,) = generate(llm, "Once upon a time", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        logits = plain_logits(llm.executor.model, out.prompt_token_ids + out.outputs[0].token_ids)
        assert logits[len(out.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == out.outputs[0].token_ids

    def test_seeded_text_does_not_depend_on_the_batch(self, llm):
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
        alone = generate(llm, "Once upon a time", params)[0].outputs[0].token_ids
        crowd = generate(llm, ["The dog", "Once upon a time", "A girl"], params)
        assert crowd[1].outputs[0].token_ids == alone

    def test_unseeded_requests_differ(self, llm):
        outputs = generate(llm, ["Once upon a time"] * 4, SamplingParams(temperature=1.5, max_tokens=12))
        assert len({tuple(out.outputs[0].token_ids) for out in outputs}) > 1

    def test_n_samples_differ_and_share_the_prompt(self, llm):
        prompt = list(range(5, 5 + 40))
        llm.llm_engine.reset_prefix_cache()
        (out,) = generate(llm, prompt, SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=12))
        assert [c.index for c in out.outputs] == [0, 1, 2]
        assert len({tuple(c.token_ids) for c in out.outputs}) == 3
        single = generate(llm, prompt, SamplingParams(temperature=1.5, seed=2, max_tokens=12))[0]
        assert single.outputs[0].token_ids == out.outputs[1].token_ids  # seed + index
        assert single.num_cached_tokens == 32

    def test_cached_tokens_and_salt(self, llm):
        prompt = list(range(10, 10 + 50))
        llm.llm_engine.reset_prefix_cache()
        first = generate(llm, prompt, GREEDY)[0]
        again = generate(llm, prompt, GREEDY)[0]
        salted = generate(llm, {"prompt_token_ids": prompt, "cache_salt": "mine"}, GREEDY)[0]
        assert [o.num_cached_tokens for o in (first, again, salted)] == [0, 48, 0]
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == salted.outputs[0].token_ids

    def test_logprobs(self, llm):
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
        (out,) = generate(llm, "Once upon a time", params)
        logprobs = plain_logits(llm.executor.model, out.prompt_token_ids + out.outputs[0].token_ids).log_softmax(-1)
        start = len(out.prompt_token_ids)
        for i, (token, row) in enumerate(zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)):
            assert row[token].logprob == pytest.approx(logprobs[start - 1 + i, token].item(), abs=1e-4)
            assert row[token].rank == 1 and len(row) == 2
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == start
        for i, token in enumerate(out.prompt_token_ids[1:]):
            assert out.prompt_logprobs[i + 1][token].logprob == pytest.approx(logprobs[i, token].item(), abs=1e-4)

    def test_prompt_logprobs_survive_chunks_and_preemption(self):
        small = LLM(
            "tiny", block_size=4, max_model_len=64, num_gpu_blocks_override=21, max_num_seqs=4, max_num_batched_tokens=6
        )
        prompts = [[10 + i, *range(20, 50)] for i in range(3)]
        outputs = generate(small, prompts, SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0))
        assert any(event.preempted for event in small.event_log)
        for out in outputs:
            logprobs = plain_logits(small.executor.model, out.prompt_token_ids).log_softmax(-1)
            assert [row is None for row in out.prompt_logprobs] == [True] + [False] * 30
            for i, token in enumerate(out.prompt_token_ids[1:]):
                assert out.prompt_logprobs[i + 1][token].logprob == pytest.approx(logprobs[i, token].item(), abs=1e-4)

    def test_priority_decides_who_goes_first(self):
        small = LLM("tiny", max_num_seqs=1, scheduling_policy="priority", num_gpu_blocks_override=80)
        generate(small, ["one", "two", "three"], GREEDY, priority=[2, 0, 1])
        order = [next(iter(e.hits)) for e in small.event_log if e.hits]
        assert order == ["1", "2", "0"]

    def test_progress_bar_shows_tokens_per_second(self, llm, capsys):
        llm.generate(["one", "two"], GREEDY)
        err = capsys.readouterr().err
        assert "2/2" in err and "tokens/s" in err


class TestChat:
    def test_without_a_template(self, llm):
        if llm.tokenizer.chat_template is not None:
            pytest.skip("the embedded model has a chat template")
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY)

    def test_template_prompt(self, llm, monkeypatch):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        template += "{% if add_generation_prompt %}you: {% endif %}"
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        conversation = [{"role": "user", "content": "Hello"}]
        (out,) = llm.chat(conversation, GREEDY, use_tqdm=False)
        assert out.prompt == "user: Hello\nyou: "
        assert out.prompt_token_ids == llm.tokenizer.encode(out.prompt, add_special_tokens=False)
        assert [o.prompt for o in llm.chat([conversation] * 2, GREEDY, use_tqdm=False)] == [out.prompt] * 2
        assert llm.chat(conversation, GREEDY, add_generation_prompt=False, use_tqdm=False)[0].prompt == "user: Hello\n"


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((5, GREEDY), {}, "prompts must be a prompt or a list of prompts, got int"),
            (
                (["a", "b"], [GREEDY]),
                {},
                "sampling_params has 1 entries for 2 prompts; give one for all, or one for each",
            ),
            ((["a", "b"], GREEDY), {"priority": [1]}, "priority has 1 entries for 2 prompts"),
            ((["a"], GREEDY), {"priority": [1]}, "priority=1 has no effect under scheduling_policy='fcfs'"),
            ((["a", ""], GREEDY), {}, "the prompt is empty"),
            ((["a", [10**9]], GREEDY), {}, "token id 1000000000 is out of range"),
            ((["a"], 5), {}, "sampling_params must be a list with one entry per prompt, got 5"),
            ((["a"], GREEDY), {"priority": 5}, "priority must be a list with one entry per prompt, got 5"),
            ((["a"], ["b"]), {}, "sampling_params must be a SamplingParams, got str"),
        ],
    )
    def test_bad_calls_run_nothing(self, llm, args, kwargs, message):
        steps = len(llm.event_log)
        with pytest.raises(ValueError, match=message):
            generate(llm, *args, **kwargs)
        assert len(llm.event_log) == steps

    @pytest.mark.parametrize("messages", ["hello", ["hello"], [["hello"]], {"role": "user"}, [[]], None, [{"x": 1}]])
    def test_what_is_no_conversation(self, llm, messages):
        with pytest.raises(ValueError, match="a conversation is a list of dicts with 'role' and 'content', got"):
            llm.chat(messages, GREEDY)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"device": "banana"}, "device must be 'auto', 'cpu', 'cuda' or 'mps', got 'banana'"),
            ({"device": None}, "device must be 'auto', 'cpu', 'cuda' or 'mps', got None"),
            ({"device": "meta"}, "device must be 'auto', 'cpu', 'cuda' or 'mps', got 'meta'"),
            ({"max_num_seqs": "a"}, "max_num_seqs must be a whole number of at least 1, got 'a'"),
            ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be a whole number of at least 1, got 1.5"),
            ({"watermark": "x"}, r"watermark is a fraction of all blocks and must be in \[0, 1\), got 'x'"),
            ({"gpu_memory_utilization": None}, r"gpu_memory_utilization must be in \(0, 1\], got None"),
            ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
            ({"enable_chunked_prefill": 0}, "enable_chunked_prefill must be True or False, got 0"),
            ({"max_log_steps": -1}, "max_log_steps must be a whole number of at least 1, got -1"),
            ({"seed": []}, r"seed must be a whole number, got \[\]"),
            ({"model": "tinny"}, "tinny"),
            ({"max_model_len": 4096}, r"max_model_len=4,096 is more than tiny can do: 1,024 tokens"),
            ({"max_model_len": 1}, "max_model_len must be a whole number of at least 2, got 1"),
            ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
            ({"block_size": 16.0}, "block_size must be a whole number"),
            ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
            ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
            ({"kv_cache_memory_bytes": 100}, r"No room for the KV cache: 0\.000 GiB are left .* two are the least"),
            (
                {"kv_cache_memory_bytes": 10**6},
                r"needs 64 KV blocks of 16, but the pool has .* max_model_len that fits is",
            ),
            ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be a whole number of at least 2, got 1"),
            ({"num_gpu_blocks_override": 64}, r"needs 64 KV blocks of 16, but the pool has 63 .* that fits is 1,009\."),
            ({"num_gpu_blocks_override": 10**9}, r"1,000,000,000 KV blocks take .* GiB, but this cpu has .* would fit"),
            ({"scheduling_policy": "sjf"}, r"scheduling_policy\) must be one of fcfs, priority, got 'sjf'"),
            ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1"),
            (
                {"max_num_seqs": 64, "max_num_batched_tokens": 32},
                r"max_num_batched_tokens \(32\) must be at least max_num",
            ),
            (
                {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
                r"With chunked prefill off .* \(512\) is smaller than max_model_len \(1024\)",
            ),
            ({"long_prefill_token_threshold": 2000}, r"long_prefill_token_threshold \(2000\) must not exceed"),
            ({"watermark": 1.0}, r"watermark is a fraction of all blocks and must be in \[0, 1\), got 1.0"),
            ({"attention_backend": "flash"}, "unknown attention backend 'flash'"),
            ({"dtype": "int8"}, "int8"),
            ({"device": "cuda"}, "sees no CUDA GPU. Use device='cpu'"),
        ],
    )
    def test_bad_settings(self, kwargs, message):
        if kwargs.get("device") == "cuda" and torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        with pytest.raises(ValueError, match=message):
            LLM(**{"model": "tiny", "device": "cpu", **kwargs})


class TestInterruption:
    def test_an_error_in_a_forward_pass(self, llm, monkeypatch):
        calls = []

        def failing(*args):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("device lost")
            return attention(*args)

        attention = llm.executor.attention.forward
        monkeypatch.setattr(llm.executor.attention, "forward", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            generate(llm, [list(range(3, 60)), "two"], GREEDY)
        monkeypatch.setattr(llm.executor.attention, "forward", attention)
        (out,) = generate(llm, list(range(3, 60)), GREEDY)
        assert out.num_cached_tokens == 0  # the failed pass left nothing to hit
        logits = plain_logits(llm.executor.model, out.prompt_token_ids)
        assert out.outputs[0].token_ids[0] == logits[-1].argmax().item()

    def test_ctrl_c_during_generate(self, llm):
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["Once upon a time"] * 8, SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
        timer.join()
        assert llm.llm_engine.scheduler.kv_cache_manager.usage == pytest.approx(0.0)
        assert generate(llm, "Once upon a time", GREEDY)[0].finished

    def test_ctrl_c_while_prompts_are_being_added(self, llm, monkeypatch):
        scheduler = llm.llm_engine.scheduler
        add, calls = scheduler.add_request, []

        def interrupted(request):
            calls.append(request)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            add(request)

        monkeypatch.setattr(scheduler, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["one", "two", "three"], GREEDY)
        monkeypatch.setattr(scheduler, "add_request", add)
        assert len(generate(llm, ["one", "two", "three"], GREEDY)) == 3

    def test_threads_wait_for_each_other(self, llm):
        expected = [out.outputs[0].token_ids for out in generate(llm, ["one", "two"], GREEDY)]
        got = {}
        threads = [
            threading.Thread(target=lambda i=i: got.update({i: generate(llm, ["one", "two"], GREEDY)}), daemon=True)
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [[out.outputs[0].token_ids for out in got[i]] for i in range(4)] == [expected] * 4

    def test_requests_that_were_added_directly_are_not_lost(self, llm):
        engine = llm.llm_engine
        engine.add_request(str(llm._next_id), "mine", SamplingParams(max_tokens=2), output_kind="final_only")
        mine = str(llm._next_id)
        (out,) = generate(llm, "Once upon a time", GREEDY)
        assert out.request_id != mine
        (kept,) = engine.step()
        assert kept.request_id == mine and kept.finished

    def test_an_exception_of_the_caller_in_a_stream(self, llm):
        with pytest.raises(ZeroDivisionError):
            for _ in llm.llm_engine.stream("Once upon a time", SamplingParams(max_tokens=50)):
                raise ZeroDivisionError
        import gc

        gc.collect()  # the generator is closed when it goes, which aborts its request


class TestPool:
    def test_capacity_report_and_defaults(self, caplog):
        with caplog.at_level(logging.INFO, logger="minivllm"):
            small = LLM("tiny", kv_cache_memory_bytes=32 * 2**20, device="cpu")
        per_block = memory.kv_bytes_per_block(small.model_config, 16, torch.float32)
        num_blocks = 32 * 2**20 // per_block
        assert small.cache_config.num_blocks == num_blocks
        expected = (
            f"CPU KV cache size: {int(num_blocks / 64 * 1024):,} tokens, "
            f"Maximum concurrency for 1,024 tokens per request: {num_blocks / 64:.2f}x"
        )
        assert small.capacity_report == expected and expected in caplog.text
        assert (small.scheduler_config.max_num_batched_tokens, small.scheduler_config.max_num_seqs) == (4096, 256)
        assert small.executor.kv_cache.pages.shape[1:4] == (2, num_blocks, 16)

    def test_bytes_per_block(self):
        # Qwen2.5-7B, 16-bit: 56 KiB per token.
        config = ModelConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 32768, "silu", 1e-6, False)
        assert memory.kv_bytes_per_block(config, 16, torch.bfloat16) == 16 * 57344

    def test_the_pool_is_never_larger_than_the_seats_can_use(self):
        config = ModelConfig("gpt2", 64, 32, 2, 4, 4, 8, 48, 64, "gelu_new", 1e-5, True)
        common = dict(block_size=4, dtype=torch.float32, max_model_len=64, max_num_seqs=3)
        assert memory.choose_num_blocks(config, available_bytes=10**9, **common) == 3 * 16 + 1
        per_block = memory.kv_bytes_per_block(config, 4, torch.float32)
        assert memory.choose_num_blocks(config, available_bytes=20 * per_block + 5, **common) == 20

    def test_cuda_budget(self):
        gib = 2**30
        left = memory.cuda_kv_bytes(total=80 * gib, used_by_others=2 * gib, peak=17 * gib, utilization=0.92)
        assert left == int(80 * gib * 0.92) - 19 * gib

    @pytest.mark.parametrize(
        ("name", "gib", "limits"),
        [
            ("NVIDIA H100 80GB HBM3", 79.6, (16384, 1024)),
            ("NVIDIA A100-SXM4-80GB", 79.3, (8192, 256)),
            ("NVIDIA L40S", 44.5, (8192, 256)),
        ],
    )
    def test_default_limits_on_gpus(self, monkeypatch, name, gib, limits):
        properties = type("Properties", (), {"total_memory": int(gib * 2**30)})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert memory.batch_limits(torch.device("cuda")) == limits

    def test_event_log_can_be_bounded(self):
        small = LLM("tiny", num_gpu_blocks_override=80, max_log_steps=3)
        generate(small, "Once upon a time", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert [event.step for event in small.event_log] == [5, 6, 7]

    def test_half_precision_on_request(self):
        small = LLM("tiny", num_gpu_blocks_override=80, dtype="bfloat16", device="cpu")
        assert small.executor.kv_cache[0].dtype == torch.bfloat16
        assert generate(small, "Once upon a time", GREEDY)[0].finished

    def test_float32_on_a_cpu_unless_asked_otherwise(self, llm):
        if llm.executor.device.type == "cpu":
            assert llm.executor.kv_cache[0].dtype == torch.float32

    def test_mps_is_tried_and_given_up_with_a_word(self, monkeypatch, caplog):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        device, word = memory.resolve_device("auto")  # a torch without MPS fails the trial
        if device.type == "mps":
            pytest.skip("MPS works here")
        assert device.type == "cpu" and word.startswith("MPS is present but failed a trial (")
        with caplog.at_level(logging.WARNING, logger="minivllm"):
            LLM("tiny", num_gpu_blocks_override=80)
        assert "using the CPU" in caplog.text
