"""`minivllm size` and `minivllm roofline`: right answers, and one clear line for what cannot be."""

import json

import pytest

from minivllm.cli.program import main
from minivllm.theory import list_devices, list_models
from minivllm.theory.catalog import DATA

SIZE = ["size", "--model", "qwen2.5-7b", "--gpu", "h100-sxm"]
ROOFLINE = ["roofline", "--model", "qwen2.5-7b", "--gpu", "h100-sxm"]


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    return code, *capsys.readouterr()


class TestSize:
    def test_table(self, capsys):
        code, out, _ = run(capsys, *SIZE, "--context", "32768", "--concurrency", "16")
        assert code == 0
        for text in ("57,344 B = 56.00 KiB", "1.75 GiB", "28 full layers", "Limit: KV memory", "the 16 wanted fit"):
            assert text in out

    def test_json(self, capsys):
        code, out, _ = run(capsys, *SIZE, "--context", "32768", "--concurrency", "16", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["kv_bytes_per_token_per_gpu"] == 57344
        assert found["kv_tokens"] == 16 * found["num_blocks"]
        assert found["max_concurrency_requests"] == found["num_blocks"] / 2048
        used = sum(found[f"{part}_bytes_per_gpu"] for part in ("weights", "activation", "other", "kv_budget"))
        assert used == pytest.approx(0.92 * found["memory_bytes_per_gpu"])
        assert found["fits"] is True

    def test_two_gpus_and_fp8(self, capsys):
        one, two = (
            json.loads(run(capsys, *SIZE, "--json", "--context", "4096", *more)[1])
            for more in ([], ["--tp", "2", "--kv-dtype", "fp8"])
        )
        assert two["kv_bytes_per_token_per_gpu"] == one["kv_bytes_per_token_per_gpu"] / 4
        assert two["kv_tokens"] > 4 * one["kv_tokens"]

    def test_scales_are_named(self, capsys):
        _, out, _ = run(capsys, *SIZE, "--kv-dtype", "INT8")
        assert "weights bfloat16, KV cache int8" in out
        assert "29,568 B = 28.88 KiB = 29.57 kB, scales included: 4 bytes per token and head" in out
        assert "2 bytes per 32 elements" in run(capsys, *SIZE, "--kv-dtype", "q8_0")[1]
        assert "scales" not in run(capsys, *SIZE, "--kv-dtype", "fp8")[1]

    def test_known_figures_win(self, capsys):
        arguments = [*SIZE, "--json", "--weights-gib", "15", "--activation-gib", "2", "--other-gib", "1"]
        found = json.loads(run(capsys, *arguments)[1])
        assert found["weights_bytes_per_gpu"] == 15 * 2**30 and found["activation_bytes_per_gpu"] == 2 * 2**30

    def test_what_does_not_fit_gets_ways_out(self, capsys):
        code, out, _ = run(capsys, *SIZE, "--context", "32768", "--concurrency", "60")
        assert code == 0
        assert "the 60 wanted do not fit" in out
        assert "Any of these would do: --tp 2; or --kv-dtype fp8" in out and "--context" in out
        assert json.loads(run(capsys, *SIZE, "--concurrency", "60", "--json")[1])["fits"] is False

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--model", "qwen1.5-7b", "--gpu", "h200", "--context", "32768", "--concurrency", "300"],
            ["--model", "llama-3-8b", "--gpu", "l4", "--tp", "8", "--context", "2048", "--concurrency", "300"],
            ["--model", "gemma-3-27b", "--gpu", "mi300x", "--context", "32768", "--concurrency", "64"],
            ["--model", "mistral-7b", "--gpu", "h200", "--context", "32768", "--concurrency", "300"],
            ["--model", "qwen2.5-7b", "--gpu", "h100", "--context", "131072", "--concurrency", "20"],
            ["--model", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--context", "65536", "--concurrency", "500"],
        ],
    )
    def test_ways_out_are_ways_out(self, capsys, arguments):
        """Each alone makes the wanted requests fit."""
        _, out, _ = run(capsys, "size", *arguments)
        line = next(line for line in out.splitlines() if " would do: " in line)
        options = line.partition(" would do: ")[2].rstrip(".").split("; or ")
        assert options and line.startswith("Any of these" if len(options) > 1 else "This")
        for option in options:
            changed = option.split()
            kept = list(arguments)
            for name in changed[::2]:
                if name in kept:
                    place = kept.index(name)
                    del kept[place : place + 2]
            assert json.loads(run(capsys, "size", *kept, *changed, "--json")[1])["fits"], option

    def test_a_config_of_ones_own(self, capsys, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100,
        }))  # fmt: skip
        code, out, _ = run(capsys, "size", "--config", str(path), "--gpu", "t4", "--context", "100", "--json")
        assert code == 0 and json.loads(out)["kv_bytes_per_token_per_gpu"] == 2 * 2 * 4 * 16 * 2
        (tmp_path / "model.safetensors").write_bytes(bytes(12345))
        arguments = ["size", "--config", str(tmp_path), "--gpu", "t4", "--json"]
        assert json.loads(run(capsys, *arguments)[1])["weights_bytes_per_gpu"] == 12345
        assert json.loads(run(capsys, *arguments, "--weight-dtype", "fp8")[1])["weights_bytes_per_gpu"] > 12345

    def test_explain(self, capsys):
        _, out, _ = run(capsys, *SIZE, "--explain")
        assert "= 2 * 28 * 4 * 128 * 2" in out and "KV budget = memory * utilization - weights" in out

    def test_two_shapes(self, capsys):
        _, out, _ = run(capsys, "size", "--model", "gemma-4-31b", "--gpu", "h200", "--context", "32768")
        assert "16 KV heads of 256 (4 of 512 where attention is full)" in out
        assert "of 16 or 32 tokens, for groups of layers: 1 full, 5 sliding" in out

    def test_windows(self, capsys):
        """Tokens as vLLM logs them: concurrency x context, whatever the layers keep."""
        arguments = ["size", "--model", "gemma-3-27b", "--gpu", "h200", "--context", "32768"]
        _, out, _ = run(capsys, *arguments)
        assert "10 full, 52 sliding (1,024) layers" in out
        assert "of 16 tokens, for groups of layers: 1 full, 6 sliding" in out
        found = json.loads(run(capsys, *arguments, "--json")[1])
        assert found["kv_tokens"] == int(found["num_blocks"] / found["blocks_per_request"] * 32768)

    def test_states(self, capsys):
        _, out, _ = run(capsys, "size", "--model", "qwen3.5-27b", "--gpu", "h100-sxm", "--context", "32768")
        assert "blocks" in out and "of 784 tokens, for groups of layers: 1 full, 3 linear" in out
        assert "state             146.81 MiB = 153.94 MB per request and GPU, whatever its length" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_dtype": "uint8"}, "torch_dtype 'uint8' is unknown; known: float32, float16, bfloat16"),
        ({"num_hidden_layers": 10**30}, "0000; expected a whole number from 0 to 1,000"),
        ({"num_experts": 4, "mlp_only_layers": True}, "mlp_only_layers is True, expected a list"),
        ({"layer_types": [[1], [1]]}, "'layer_types' is [[1], [1]]; expected a list of names"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'; expected a whole number"),
        ({"vocab_size": True}, "'vocab_size' is True; expected a whole number"),
        ({"index_topk": 2048}, "the config has index_topk: sparse attention with an index of its own"),
        ({"attn_layer_period": 8}, "which this calculator does not model"),
        (
            {"quantization_config": {"quant_method": "new"}},
            "is quantised in a way that is not known here (new): give the --weight-dtype that comes closest",
        ),
    ],
)
def test_strange_configs(capsys, tmp_path, change, message):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    code, out, err = run(capsys, "size", "--config", str(tmp_path), "--gpu", "t4")
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_an_unknown_architecture_is_said_to_be_one(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "brand-new", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }))  # fmt: skip
    assert "counted as if it were a Llama" in run(capsys, "size", "--config", str(tmp_path), "--gpu", "t4")[1]
    assert run(capsys, "size", "--config", str(tmp_path), "--gpu", "t4", "--json")[1].count(
        '"architecture_known": false'
    )
    assert "counted as if it were a Llama" in run(capsys, "roofline", "--config", str(tmp_path), "--gpu", "t4")[1]


class TestRoofline:
    def test_mixtures_become_bound_by_compute_when_all_experts_are_read(self, capsys):
        found = json.loads(run(capsys, "roofline", "--model", "mixtral-8x7b", "--gpu", "h100", "--json")[1])
        assert 3.5 * 295 < found["critical_batch_weights_only"] < 4 * 295  # 8 / 2 for the experts

    def test_table(self, capsys):
        code, out, _ = run(capsys, *ROOFLINE, "--batch", "1", "256", "--context", "512")
        assert code == 0
        assert "ridge point: 295 FLOP/B" in out
        assert [line.split()[-1] for line in out.splitlines() if line.startswith(("prefill", "decode"))] == [
            "compute", "memory", "memory",
        ]  # fmt: skip

    def test_json(self, capsys):
        found = json.loads(run(capsys, *ROOFLINE, "--json")[1])
        assert found["critical_batch_with_kv_reads"] is None  # 4,096 tokens: KV reads never hide
        assert found["critical_batch_weights_only"] == pytest.approx(295, abs=1)
        speeds = [step["tokens_per_s"] for step in found["steps"] if step["phase"] == "decode"]
        assert speeds == sorted(speeds)

    def test_products_of_fp8_weights_run_in_fp8_where_they_can(self, capsys):
        def found(*more):
            arguments = ("roofline", "--model", "llama-3.1-8b", "--context", "4096", *more, "--json")
            return json.loads(run(capsys, *arguments)[1])

        plain, fp8 = found("--gpu", "h100-sxm"), found("--gpu", "h100-sxm", "--weight-dtype", "fp8")
        assert (plain["compute_dtype"], fp8["compute_dtype"]) == ("bfloat16", "fp8")
        # Half the time, but for the output head, which is read for one row of logits.
        assert fp8["steps"][0]["step_s"] == pytest.approx(plain["steps"][0]["step_s"] / 2, rel=0.01)
        assert fp8["critical_batch_weights_only"] == pytest.approx(plain["critical_batch_weights_only"], rel=0.15)
        # An A100 has no rate for fp8: the weights are unpacked, as those in 4 bits are everywhere.
        assert found("--gpu", "a100-80gb-sxm", "--weight-dtype", "fp8")["compute_dtype"] == "bfloat16"
        assert found("--gpu", "h100-sxm", "--weight-dtype", "int4")["compute_dtype"] == "bfloat16"
        asked = found("--gpu", "h100-sxm", "--weight-dtype", "int8", "--compute-dtype", "INT8")
        assert asked["compute_dtype"] == "int8" and asked["ridge_flop_per_byte"] == fp8["ridge_flop_per_byte"]

    def test_what_does_not_fit_is_said_to(self, capsys):
        _, out, _ = run(capsys, "roofline", "--model", "llama-3.1-405b", "--gpu", "t4", "--batch", "1")
        assert "note: the weights, 755.96 GiB = 811.71 GB per GPU, do not fit into its 14.57 GiB" in out
        assert [line.split()[4] for line in out.splitlines() if line.startswith("decode")] == ["0.4"]
        assert "note" not in run(capsys, *ROOFLINE)[1]

    def test_plot(self, capsys, tmp_path):
        path = tmp_path / "roof.png"
        assert run(capsys, *ROOFLINE, "--plot", str(path))[0] == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        code, _, err = run(capsys, *ROOFLINE, "--plot", str(tmp_path / "no" / "folder.png"))
        assert code == 2 and "cannot be written" in err


class TestWaysOut:
    """What a hostile reader found: each of these once gave a way that was none."""

    def ways(self, capsys, *arguments):
        return run(capsys, "size", *arguments)[1].partition(" would do: ")[2].strip()

    def test_seats_need_a_token_each(self, capsys):
        small = ["--model", "qwen2.5-0.5b", "--gpu", "l4", "--context", "128", "--concurrency", "3000"]
        assert self.ways(capsys, *small) == "--max-num-seqs 3000 --max-num-batched-tokens 3000."
        found = json.loads(
            run(capsys, "size", *small, "--max-num-seqs", "3000", "--max-num-batched-tokens", "3000", "--json")[1]
        )
        assert found["fits"]
        code, _, err = run(capsys, "size", *small, "--max-num-seqs", "3000")
        assert code == 2 and "max_num_batched_tokens (2,048) is less than max_num_seqs (3,000)" in err

    def test_two_changes_together(self, capsys):
        base = ["--model", "qwen3.5-27b", "--gpu", "h100-sxm", "--concurrency", "400"]
        way = self.ways(capsys, *base)
        assert way.startswith("--tp ") and " --context " in way
        assert json.loads(run(capsys, "size", *base, *way.rstrip(".").split(), "--json")[1])["fits"]

    def test_more_than_any_server_holds(self, capsys):
        assert (
            self.ways(capsys, "--model", "qwen2.5-7b", "--gpu", "h100-sxm", "--concurrency", "1000000000")
            == "--concurrency 8."
        )

    def test_fewer_requests_are_as_many_as_memory_holds(self, capsys):
        seats = ["--model", "qwen3.5-35b-a3b", "--gpu", "t4", "--tp", "8", "--context", "1024"]
        way = self.ways(capsys, *seats, "--concurrency", "5000", "--max-num-seqs", "64").rstrip(".").split()
        assert way[0] == "--concurrency" and int(way[1]) > 64 and way[2] == "--max-num-seqs"
        assert json.loads(run(capsys, "size", *seats, *way, "--json")[1])["fits"]

    def test_smaller_blocks_with_another_change(self, capsys):
        base = ["--model", "gemma-3-4b", "--gpu", "a10", "--tp", "8", "--context", "32768", "--concurrency", "500"]
        assert "--block-size 16" in self.ways(capsys, *base, "--block-size", "1024", "--max-num-seqs", "4")

    def test_a_block_larger_than_the_pool(self, capsys):
        arguments = ["--model", "qwen2.5-0.5b", "--gpu", "h100-sxm", "--block-size", "1000000000"]
        assert "--block-size 16" in self.ways(capsys, *arguments)
        found = json.loads(run(capsys, "size", *arguments, "--json")[1])
        assert found["requests_at_once"] == 0 and not found["fits"]

    def test_tp_that_is_no_power_of_two(self, capsys):
        code, _, err = run(capsys, "size", "--model", "phi-4", "--gpu", "t4")
        assert code == 2 and err.rstrip().endswith("; --tp 5 would do")

    def test_no_room_names_what_takes_it(self, capsys):
        arguments = ["size", "--model", "qwen2.5-0.5b", "--gpu", "h100-sxm", "--activation-gib", "100"]
        assert "Lower activations (max_num_batched_tokens) or the rest" in run(capsys, *arguments)[2]


class TestServedAsVllmDoes:
    def test_float32_checkpoints_in_16_bits(self, capsys):
        _, out, _ = run(capsys, "size", "--model", "gpt2", "--gpu", "h100-sxm")
        assert "\nnote  " in out and "a float32 checkpoint, which vLLM serves in 16 bits" in out and "36,864 B" in out
        assert "36.0 KiB" in run(capsys, "catalog", "GPT-2")[1]

    def test_the_longest_context_fits(self, capsys):
        """Its steps may be larger, which takes memory."""
        arguments = [
            "size",
            "--model",
            "qwen2.5-7b",
            "--gpu",
            "a10g",
            "--block-size",
            "32",
            "--max-num-seqs",
            "2",
            "--json",
        ]
        longest = json.loads(run(capsys, *arguments, "--context", "100")[1])["longest_context_tokens"]
        assert json.loads(run(capsys, *arguments, "--context", str(longest))[1])["fits"]

    def test_states_follow_the_served_dtype(self, capsys, tmp_path):
        rows = json.loads((DATA / "models.json").read_text(encoding="utf-8"))
        config = next(row["config"] for row in rows if row["name"] == "qwen3-coder-next")
        found = []
        for dtype in ("float32", "bfloat16"):
            (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
            arguments = ["size", "--config", str(tmp_path), "--gpu", "h200", "--tp", "2", "--json"]
            found.append(json.loads(run(capsys, *arguments)[1])["num_blocks"])
        assert found[0] == found[1]

    def test_command_r(self, capsys):
        assert (
            run(capsys, "size", "--model", "command-r", "--gpu", "h100-sxm", "--context", "131072", "--tp", "4")[0] == 0
        )

    def test_batches_in_flight_and_states_with_stages(self, capsys):
        def plan(model, pp):
            return json.loads(run(capsys, "size", "--model", model, "--gpu", "h100-sxm", "--pp", str(pp), "--json")[1])

        assert plan("gemma-3-27b", 2)["blocks_per_request"] == 8192 + 6 * (-(-(1023 + 3 * 8192) // 16) + 1)
        out = run(capsys, "size", "--model", "qwen3.5-27b", "--gpu", "h100-sxm", "--pp", "2")[1]
        assert "state             73.41 MiB" in out

    def test_default_batch_is_what_the_requests_can_use(self, capsys):
        found = run(capsys, *SIZE, "--context", "16", "--max-num-seqs", "4", "--json")[1]
        assert json.loads(found)["max_num_batched_tokens"] == 64


def test_roofline_without_a_context(capsys):
    assert run(capsys, "roofline", "--model", "gpt2", "--gpu", "h100-sxm")[0] == 0


class TestCatalog:
    def test_all(self, capsys):
        code, out, _ = run(capsys, "catalog")
        assert code == 0 and len(out.splitlines()) == len(list_models()) + len(list_devices()) + 3
        assert all(len(line) <= 78 for line in out.splitlines())

    def test_some(self, capsys):
        _, out, _ = run(capsys, "catalog", "H100")
        assert [line.split()[0] for line in out.splitlines()] == ["device", "h100-pcie", "h100-sxm", "h100-nvl"]
        assert "79.2 GiB" in out and "3,350 GB/s" in out and "989 TFLOP/s" in out
        _, out, _ = run(capsys, "catalog", "qwen2.5-7b")
        assert out.splitlines()[1].split() == ["qwen2.5-7b", "7.62", "B", "56.0", "KiB", "131,072"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ROOFLINE, "--plot", "/"], "cannot be written to '/': give a file name"),
        ([*ROOFLINE, "--plot", ""], "cannot be written to '': give a file name"),
        ([*ROOFLINE, "--compute-efficiency", "1e-200"], "expected 0.001 to 1"),
        ([*SIZE, "--json", "--explain"], "argument --explain: not allowed with argument --json"),
        (
            ["size", "--model", "qwen3.5-27b", "--gpu", "h200", "--tp", "12"],
            "16 key and 48 value heads of linear attention",
        ),
        (["catalog", "xyz"], "no model or GPU has 'xyz' in its name"),
        (["size", "--model", "qwen2.5-8b", "--gpu", "h100-sxm"], "unknown model 'qwen2.5-8b'; closest: "),
        (["size", "--model", "qwen2.5-7b", "--gpu", "h101"], "unknown device 'h101'; closest: h100"),
        ([*SIZE, "--context", "200000"], "context 200,000 is more than qwen2.5-7b was made for: at most 131,072"),
        ([*ROOFLINE, "--context", "200000"], "context 200,000 is more than qwen2.5-7b was made for: at most 131,072"),
        (
            ["size", "--model", "llama-3.1-70b", "--gpu", "h100-sxm"],
            "llama-3.1-70b does not fit on 1 x NVIDIA H100 SXM5 80GB: nothing is left for the KV cache",
        ),
        (["size", "--model", "llama-3.1-405b", "--gpu", "t4", "--tp", "8"], "no --tp would do"),
        ([*SIZE, "--context", "0"], "argument --context: 0 is not a whole number from 1 to 1,000,000,000"),
        ([*SIZE, "--context", "-5"], "argument --context: -5 is not a whole number from 1 to 1,000,000,000"),
        ([*SIZE, "--context", "many"], "argument --context: 'many' is not a whole number"),
        ([*SIZE, "--concurrency", "0"], "argument --concurrency: 0 is not a whole number from 1 to 1,000,000,000"),
        ([*SIZE, "--tp", "3"], "28 attention heads, which 3 GPUs cannot share evenly; tp can be 1, 2, 4"),
        (
            [*SIZE, "--gpu-memory-utilization", "1.2"],
            "gpu_memory_utilization is 1.2, expected more than 0",
        ),
        ([*SIZE, "--gpu-memory-utilization", "nan"], "argument --gpu-memory-utilization: nan is not a positive number"),
        ([*SIZE, "--kv-dtype", "int3"], "KV dtype 'int3' is unknown; known: auto"),
        (["size", "--model", "mistral-7b", "--gpu", "t4", "--kv-dtype", "int3"], "KV dtype 'int3' is unknown"),
        (["size", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "t4"], "closest: qwen2.5-7b, "),
        (["roofline", "--model", "gpt2", "--gpu", "t4", "--compute-dtype", "fp8"], "has no rate for 'fp8'"),
        ([*SIZE, "--weight-dtype", "int3"], "weight dtype 'int3' is unknown"),
        (["size", "--gpu", "t4"], "give either --model NAME or --config PATH"),
        ([*SIZE, "--config", "config.json"], "give either --model NAME or --config PATH"),
        (["size", "--config", "/nowhere/config.json", "--gpu", "t4"], "/nowhere/config.json cannot be read"),
        (["size", "--model", "qwen2.5-7b"], "the following arguments are required: --gpu"),
        ([*ROOFLINE, "--batch", "0"], "argument --batch: 0 is not a whole number from 1 to 1,000,000,000"),
        ([*ROOFLINE, "--memory-efficiency", "2"], "memory_efficiency is 2.0, expected 0.001 to 1"),
        (["roofline", "--model", "qwen2.5-7b", "--gpu", "m4-max"], "has no rate for 'bfloat16'"),
        (["sizes"], "invalid choice: 'sizes'"),
        ([*SIZE, "--tp", "9" * 400], "is not a whole number from 1 to 1,000,000,000"),
        ([*ROOFLINE, "--batch", "30000000"], "--batch is 30,000,000, at most 100,000 requests"),
        (["drill", "--count", "100000000"], "--count is 100,000,000, at most 1,000 questions"),
        (["size", "--model", "x" * 5000, "--gpu", "t4"], "unknown model 'xxx"),
    ],
)
def test_one_clear_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("minivllm ") or err.startswith("python -m minivllm")
    assert message in err and err.count("\n") == 1
