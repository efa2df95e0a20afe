"""Whatever is offered works: on random models, GPUs and settings."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.theory import list_devices, list_models
from minivllm.theory.plan import Settings, fits, make_plan
from minivllm.theory.ways_out import ways_out

wishes = st.fixed_dictionaries(
    {
        "context": st.sampled_from([16, 100, 2048, 8192, 32768, 131072]),
        "concurrency": st.sampled_from([1, 4, 60, 500, 5000, 10**9]),
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 1, 2]),
        "kv_dtype": st.sampled_from(["auto", "fp8"]),
        "weight_dtype": st.sampled_from(["auto", "int4"]),
        "block_size": st.sampled_from([16, 64, 1024, 10**6]),
        "max_num_seqs": st.sampled_from([None, None, 4, 256]),
        "max_num_batched_tokens": st.sampled_from([None, None, 512, 16384]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list_models()), st.sampled_from(list_devices()), wishes)
def test_every_way_out_is_one(spec, device, wish):
    wanted = Settings(**wish)
    try:
        plan = make_plan(spec, device, wanted)
    except ValueError:
        return  # does not start at all: the message has its own hint, tested with the commands
    if not plan.fits:
        for change in ways_out(plan):
            assert fits(spec, device, replace(wanted, **change)), change
