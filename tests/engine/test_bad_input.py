"""A request that can't be served is refused with a typed error, and the others continue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dora_rl.core.errors import ModelError, PromptError, RequestError, SamplingError, VersionError
from dora_rl.core.events import TrajectoryFailed
from dora_rl.engine.requests import FinishReason, Request, Sampling
from dora_rl.models.sources import MemoryWeights
from tests.engine import tiny

GOOD: dict[str, Any] = {"trajectory": 1, "version": 0, "prompt": (3, 4, 5), "sampling": Sampling(max_tokens=8)}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"prompt": tuple([3] * 300)}, PromptError, "300 tokens"),
        ({"prompt": (3, tiny.VOCAB)}, PromptError, f"token id {tiny.VOCAB}"),
        ({"prompt": (-1,)}, PromptError, "token id -1"),
        ({"prompt": ()}, PromptError, "empty"),
        ({"version": 4}, VersionError, "version 4"),
        ({"trajectory": 0}, RequestError, "already here"),
        ({"response": tuple(range(3, 11))}, PromptError, "max_tokens"),
        ({"sampling": Sampling(temperature=-1.0)}, SamplingError, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, SamplingError, "top_p"),
        ({"sampling": Sampling(top_k=-2)}, SamplingError, "top_k"),
        ({"sampling": Sampling(min_p=1.5)}, SamplingError, "min_p"),
        ({"sampling": Sampling(max_tokens=0)}, SamplingError, "max_tokens"),
        ({"sampling": Sampling(logit_bias={tiny.VOCAB: 1.0})}, SamplingError, "logit_bias"),
        ({"sampling": Sampling(seed=-1)}, SamplingError, "seed"),
        ({"sampling": Sampling(stop=("x",))}, PromptError, "tokenizer"),
        ({"sampling": Sampling(max_tokens=200)}, PromptError, "kv_bytes"),
    ],
)
def test_a_bad_request_is_refused_and_affects_no_other(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    made = tiny.model("llama")
    engine = tiny.engine(made, kv_bytes=tiny.kv_bytes(made, 6))
    engine.submit(Request(**GOOD | {"trajectory": 0}))
    engine.step()
    with pytest.raises(error, match=says):
        engine.submit(Request(**GOOD | change))
    engine.submit(Request(**GOOD | {"trajectory": 2}))
    collector = tiny.run(engine, [])
    assert {one.tokens for one in collector.finished.values()} == {8}
    assert set(collector.finished) == {0, 2}


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    made = tiny.model("llama")
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    state["model.embed_tokens.weight"][90] = float("nan")
    engine = tiny.engine(made, weights=MemoryWeights({0: state}))
    bias = Sampling(max_tokens=8, logit_bias={90: -float("inf")})
    sick = Request(**GOOD | {"trajectory": 0, "prompt": (3, 90), "sampling": bias})
    engine.submit(sick)
    engine.submit(Request(**GOOD | {"sampling": bias}))
    outputs = []
    while engine.busy:
        outputs.append(engine.step())
    engine.check()
    ends = {one.trajectory: one.reason for output in outputs for one in output.finished}
    assert ends == {0: FinishReason.FAILED, 1: FinishReason.LENGTH}
    failed = [event for output in outputs for event in output.events if isinstance(event, TrajectoryFailed)]
    assert [event.trajectory for event in failed] == [0]


def test_native_kernels_are_refused_for_a_model_they_do_not_support() -> None:
    with pytest.raises(ModelError, match="Gemma2ForCausalLM"):
        tiny.engine(tiny.model("gemma2"), kernels="native")


def test_the_context_ends_a_response() -> None:
    engine = tiny.engine(tiny.model("llama"), max_context=16)
    request = Request(**GOOD | {"sampling": Sampling(max_tokens=100)})
    ended = tiny.run(engine, [request]).finished[1]
    assert ended.reason is FinishReason.CONTEXT
    assert ended.tokens == 16 - 3


def test_threads_can_change_between_steps() -> None:
    before = torch.get_num_threads()
    engine = tiny.engine(tiny.model("llama"))
    some = tiny.requests(6, max_tokens=30)
    for request in some:
        engine.submit(request)
    collector = tiny.Collector()
    for threads in (1, 3, 2, 1, 4):
        engine.set_threads(threads)
        collector.collect(engine.step())
    with pytest.raises(RequestError, match="thread"):
        engine.set_threads(0)
    collector.run(engine)
    torch.set_num_threads(before)
    assert collector.responses == tiny.run(tiny.engine(tiny.model("llama")), some).responses


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


@pytest.mark.parametrize("stream_every", [1, 5, 100])
def test_stop_strings_and_ids(stream_every: int) -> None:
    made = tiny.model("llama")
    free = tiny.run(tiny.engine(made), [Request(**GOOD | {"sampling": Sampling(max_tokens=40)})]).responses[1].tokens
    text = Letters().decode(list(free))
    stop = text[12:15]
    engine = tiny.engine(made, stream_every=stream_every)
    engine._tokenizer = Letters()
    by_text = Request(**GOOD | {"sampling": Sampling(max_tokens=40, stop=("?", stop))})
    by_id = Request(**GOOD | {"trajectory": 1, "sampling": Sampling(max_tokens=40, stop_ids=(free[9],))})
    for request, length in ((by_text, text.index(stop) + 3), (by_id, free.index(free[9]) + 1)):
        collector = tiny.run(engine, [request])
        assert collector.responses[1].tokens == free[:length]
        assert collector.finished[1].reason is FinishReason.STOP
