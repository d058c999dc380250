"""`dora_rl.Engine`: versions, log-probs, sessions that keep their KV and move with it, and mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dora_rl import Completion, Engine, EngineSession, Sampling, UserError
from dora_rl.apps.generate import generate
from dora_rl.models.text import encode_chat

PROMPTS = ["12*3=", "7*8+", "99="]
SAMPLING = Sampling(max_tokens=24, temperature=0.7, seed=3)
TALK = Sampling(max_tokens=150, seed=2, stop_ids=(1, 13, 14))
"""Turns are short: a random model samples one of these every few tokens."""


@pytest.fixture(scope="module")
def path(job: Path) -> Path:
    return job / "model"


@pytest.fixture(scope="module")
def changed(path: Path) -> dict[str, Any]:
    """Other weights of the same model."""
    torch.manual_seed(1)
    made = module(path)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    found: dict[str, Any] = made.state_dict()
    return found


@pytest.fixture(scope="module")
def both(path: Path, changed: dict[str, Any]) -> Iterator[Engine]:
    """An engine with the versions 0 and 4."""
    with Engine(path, max_versions=2, kv_tokens=1500, max_context=200) as engine:
        engine.load_version(4, changed)
        yield engine
        check_idle(engine)


def module(path: Path, weights: dict[str, Any] | None = None) -> Any:
    import transformers

    t: Any = transformers
    made = t.AutoModelForCausalLM.from_pretrained(path)
    if weights is not None:
        made.load_state_dict(weights)
    return made


def check_idle(engine: Engine) -> None:
    """No request is left, and every block of the KV cache is free."""
    core = engine._open().engine
    assert not engine._open()._turns
    assert not core.busy
    core.check()


@torch.no_grad()
def plain_logprobs(model: Any, one: Completion, temperature: float) -> torch.Tensor:
    """The log-probs of a completion by a plain forward pass of the module."""
    ids = torch.tensor([[*one.prompt_tokens, *one.tokens]])
    rows: torch.Tensor = (model(ids).logits[0, len(one.prompt_tokens) - 1 : -1] / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]


def test_each_version_generates_with_its_own_weights(path: Path, changed: dict[str, Any], both: Engine) -> None:
    """The log-probs are those of a plain forward pass of that version's module, and not of the other's."""
    assert both.versions == [0, 4]
    models = {0: module(path), 4: module(path, changed)}
    for version, other in ((0, 4), (4, 0)):
        found = both.generate(PROMPTS, SAMPLING, n=2, version=version)
        assert [len(some) for some in found] == [2, 2, 2]
        for one in (one for some in found for one in some):
            assert one.version == version
            assert len(one.tokens) == len(one.logprobs) == len(one.model_logprobs) > 0
            assert one.logprobs == pytest.approx(one.model_logprobs, abs=1e-4)  # nothing is truncated
            ours = torch.tensor(one.model_logprobs)
            assert torch.allclose(ours, plain_logprobs(models[version], one, 0.7), atol=1e-3)
            assert not torch.allclose(ours, plain_logprobs(models[other], one, 0.7), atol=1e-2)
    assert both.generate(PROMPTS, SAMPLING, n=2) == both.generate(PROMPTS, SAMPLING, n=2, version=4)


def test_log_probs_with_truncation_are_those_of_what_was_sampled_from(both: Engine) -> None:
    ((one,),) = both.generate(PROMPTS[:1], Sampling(max_tokens=24, top_k=2))
    assert all(ours > plain for ours, plain in zip(one.logprobs, one.model_logprobs, strict=True))


def test_responses_are_those_of_the_command(path: Path, both: Engine, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    out = tmp_path / "out.jsonl"
    generate(
        str(path),
        tmp_path / "prompts.txt",
        out,
        samples=2,
        max_tokens=24,
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=3,
        threads=0,
        kv_gib=0.1,
        max_requests=3,
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = {(line["line"] - 1, line["sample"]): line for line in lines}
    with both.session("1=", TALK):  # whatever else there is
        found = both.generate(PROMPTS, SAMPLING, n=2, version=0)
    for (prompt, sample), line in wanted.items():
        one = found[prompt][sample]
        assert (list(one.tokens), one.text, one.finish_reason) == (line["tokens"], line["text"], line["stop"])
        assert list(one.logprobs) == line["logprobs"]
    assert len(wanted) == 6


def test_prompts_are_text_or_token_ids_and_weights_in_memory_are_copied(path: Path) -> None:
    tokens = both_ids(path, "12*3=")
    trained = module(path)
    with Engine(path, max_versions=2, max_context=100) as engine:
        engine.load_version(1, trained)
        before = engine.generate(["12*3="], SAMPLING)
        assert engine.generate([tokens], SAMPLING) == engine.generate([tuple(tokens)], SAMPLING) == before
        assert before[0][0].prompt_tokens == tuple(tokens)
        assert before[0][0].tokens == engine.generate(["12*3="], SAMPLING, version=0)[0][0].tokens
        with torch.no_grad():
            trained.model.embed_tokens.weight.mul_(-1)
        assert engine.generate(["12*3="], SAMPLING) == before
        engine.unload_version(1)
        engine.load_version(2, trained)
        assert engine.versions == [0, 2]
        assert engine.generate(["12*3="], SAMPLING)[0][0].tokens != before[0][0].tokens
        engine.unload_version(0)
        engine.load_version(5, path)
        again = engine.generate(["12*3="], SAMPLING)[0][0]
        assert (again.version, again.tokens) == (5, before[0][0].tokens)


def both_ids(path: Path, text: str) -> list[int]:
    import transformers

    t: Any = transformers
    ids: list[int] = t.AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    return ids


def first_turn(engine: Engine, key: int | None = None, version: int = 0, sampling: Sampling = TALK) -> EngineSession:
    session = engine.session("12*3=", sampling, version=version, key=key)
    turn = session.generate()
    assert turn.finish_reason == "stop"
    assert not session.finished
    assert session.tokens == (*turn.prompt_tokens, *turn.tokens)
    return session


def test_a_session_keeps_its_kv_and_says_what_a_fresh_request_would(both: Engine) -> None:
    greedy = Sampling(max_tokens=150, temperature=0, stop_ids=TALK.stop_ids)
    with both.session("12*3=", greedy, version=4) as session:
        turn = session.generate()
        observed = 0
        while not session.finished and observed < 3:
            before = both.stats.prefilled
            turn = session.generate("77*8")
            # The token that ended the turn before was sampled and never computed.
            assert both.stats.prefilled - before == len("77*8") + 1
            whole = both.generate([turn.prompt_tokens], greedy, version=4)[0][0]
            assert turn.tokens == whole.tokens[: len(turn.tokens)]
            observed += 1
        assert observed
        assert both.stats.reprefilled == 0
    check_idle(both)


@pytest.mark.parametrize("by_bytes", [False, True])
def test_a_session_that_moves_goes_on_with_the_same_tokens(path: Path, both: Engine, by_bytes: bool) -> None:
    stay = first_turn(both, key=11)
    wanted = [stay.generate("77*8"), *([] if stay.finished else [stay.generate([5, 6, 7])])]
    stay.close()
    with Engine(path, max_context=200, kv_tokens=600) as other:
        other.generate(PROMPTS, SAMPLING)  # its KV cache is not a new one
        session = first_turn(both, key=11)
        tokens = session.tokens
        moved = other.import_session(session.export()) if by_bytes else session.move_to(other)
        with pytest.raises(UserError, match="the session has ended: it was"):
            session.generate("1")
        assert (moved.key, moved.version, moved.tokens) == (11, 0, tokens)
        before = other.stats.prefilled
        found = [moved.generate("77*8")]
        assert other.stats.prefilled - before == len("77*8") + 1
        assert other.stats.reprefilled == 0
        if len(wanted) > 1:
            found.append(moved.generate([5, 6, 7]))
        assert sum(len(turn.tokens) for turn in found) > 4
        assert found == wanted  # text, tokens and log-probs, bit by bit
        moved.close()
        check_idle(other)
    check_idle(both)


def test_a_session_that_can_not_move_stays(path: Path, both: Engine, changed: dict[str, Any]) -> None:
    stay = first_turn(both, key=3)
    wanted = stay.generate("77*8")
    stay.close()
    session = first_turn(both, key=3)
    with Engine(path, version=7, max_versions=2, max_context=200) as other:
        with pytest.raises(UserError, match="version 0 is not loaded; loaded are: 7"):
            session.move_to(other)
        other.load_version(0, changed)
        with pytest.raises(UserError, match="comes from version 0"):
            session.move_to(other)
        other.unload_version(0)
        other.load_version(0, path)
        with other.session("1=", key=3), pytest.raises(UserError, match="has a session with the key 3"):
            session.move_to(other)
        data = session.export()
        for damaged in (data[:-40], data[:200] + bytes([data[200] ^ 1]) + data[201:], b"x" * 300):
            with pytest.raises(UserError):
                other.import_session(damaged)
        check_idle(other)
        with other.import_session(data) as session:
            assert session.generate("77*8") == wanted
    check_idle(both)


def test_sessions_are_computed_together_and_do_not_disturb_each_other(both: Engine) -> None:
    alone = []
    for key in (1, 2, 3):
        with first_turn(both, key=key, version=4 * (key == 3)) as session:
            alone.append(session.generate("77*8"))
    sessions = [first_turn(both, key=key, version=4 * (key == 3)) for key in (1, 2, 3)]
    for session in sessions:
        session.extend("77*8")
    both.generate(PROMPTS, Sampling(max_tokens=100))  # computes the turns of the sessions too
    decoded = both.stats.decoded
    assert [session.generate() for session in sessions] == alone
    assert both.stats.decoded == decoded
    with pytest.raises(UserError, match="version 4 has 1 open session: close or move them first"):
        both.unload_version(4)
    for session in sessions:
        session.close()
        session.close()
    check_idle(both)


def test_max_tokens_ends_a_session(both: Engine) -> None:
    session = both.session("12*3=", Sampling(max_tokens=5, stop_ids=(14,), logit_bias={14: float("-inf")}))
    turn = session.generate()
    assert (turn.finish_reason, len(turn.tokens), session.finished) == ("length", 5, True)
    for call in (session.generate, lambda: session.extend("1"), session.export):
        with pytest.raises(UserError, match=r"the session has ended \(length\)"):
            call()
    session.close()
    assert session.finished


def test_chats_use_the_template_and_their_observations_continue_it(path: Path, tmp_path: Path) -> None:
    import transformers

    t: Any = transformers
    shutil.copytree(path, tmp_path / "model")
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'user': '0', 'assistant': '1'}[m.role] }}{{ m.content }}</s>{% endfor %}1"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "12*3="}]
    with Engine(tmp_path / "model", max_context=200) as engine:
        ((one,),) = engine.generate([chat], SAMPLING)
        assert list(one.prompt_tokens) == encode_chat(tokenizer, chat)
        session = engine.session(chat, Sampling(max_tokens=150, seed=5))
        first = session.generate()
        assert first.tokens[-1] == tokenizer.eos_token_id
        second = session.generate([{"role": "user", "content": "4+4="}])
        added = tokenizer.decode(second.prompt_tokens[len(first.prompt_tokens) + len(first.tokens) :])
        assert added == "04+4=</s>1"  # the end of the first answer was sampled


def test_a_model_without_a_tokenizer_takes_token_ids(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with Engine(tmp_path / "model", max_context=100) as engine:
        ((one,),) = engine.generate([[3, 4, 5]], SAMPLING)
        assert one.text == ""
        assert one.tokens
        with pytest.raises(UserError, match="has no tokenizer beside its weights: give token ids"):
            engine.generate(["12"])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda engine: engine.generate("12*3="), "`prompts` is one text: pass a list of prompts"),
        (lambda engine: engine.generate(["1"], n=0), "`n` must be at least 1, not 0"),
        (lambda engine: engine.generate(["1", ""]), "prompt 1: the prompt of trajectory 1 is empty"),
        (lambda engine: engine.generate(["1", [3, 999]], n=2), "prompt 1: trajectory 2 contains the token id 999"),
        (lambda engine: engine.generate(["1", 5]), "prompt 1: a prompt is a text, a list of messages"),
        (lambda engine: engine.generate([[{"role": "user", "content": "1"}]]), "has no chat template"),
        (lambda engine: engine.generate(["1"], version=2), "version 2 is not loaded; loaded are: 0, 4"),
        (lambda engine: engine.generate(["1"], Sampling(temperature=-1)), "temperature must be 0 or more"),
        (lambda engine: engine.generate(["1"], Sampling(stop=cast("Any", "="))), "'stop' must be several strings"),
        (lambda engine: engine.load_version(4, {}), "version 4 is already loaded"),
        (lambda engine: engine.load_version(5, {}), "has 2 versions, which is its 'max_versions': unload one first"),
        (lambda engine: engine.load_version(-1, {}), "a version is a number from 0 on, not -1"),
        (lambda engine: engine.unload_version(3), "version 3 is not loaded"),
        (lambda engine: engine.session("1", key=-1), "the `key` of a session is a number from 0"),
        (lambda engine: engine.import_session(b"nonsense"), "the bundle is cut off"),
    ],
)
def test_a_mistake_gives_one_sentence_and_leaves_nothing(both: Engine, call: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        call(both)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    check_idle(both)
    assert both.versions == [0, 4]


def test_a_session_is_used_in_order(both: Engine) -> None:
    with both.session("12*3=", TALK) as session:
        with pytest.raises(UserError, match="the session is in a turn: call generate before extend"):
            session.extend("1")
        with pytest.raises(UserError, match="the session is in a turn: it can leave its engine after generate"):
            session.export()
        with pytest.raises(UserError, match="has a session with the key"):
            both.session("1", key=session.key)
        session.generate()
        with pytest.raises(UserError, match="the session waits: say what comes next with extend"):
            session.generate()
    with pytest.raises(UserError, match="the session has ended: it was closed"):
        session.generate("1")


def test_weights_of_another_model_are_refused_and_leave_the_slot_free(path: Path) -> None:
    with Engine(path, max_versions=2, kv_tokens=40, max_context=200) as engine:
        own = module(path).state_dict()
        wrong = {**own, "model.norm.weight": torch.zeros(3)}
        with pytest.raises(UserError, match=r"weight 'model.norm.weight' has the shape \(3,\), not \(32,\)"):
            engine.load_version(1, wrong)
        with pytest.raises(UserError, match="the weights have 'x', which"):
            engine.load_version(1, {**own, "x": torch.zeros(1)})
        with pytest.raises(UserError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ"):
            engine.load_version(1, {**own, "lm_head.weight": own["lm_head.weight"] + 1})
        with pytest.raises(UserError, match=r"the weights lack 'model.norm.weight'"):
            engine.load_version(1, {name: one for name, one in own.items() if name != "model.norm.weight"})
        with pytest.raises(UserError, match="weights are a folder, a hub name, a module or its state_dict, not int"):
            engine.load_version(1, 3)  # type: ignore[arg-type]
        engine.load_version(1, {name: one for name, one in own.items() if name != "lm_head.weight"})  # tied
        assert engine.versions == [0, 1]
        with pytest.raises(UserError, match="may have 200 tokens, but the KV cache holds 48: raise 'kv_tokens'"):
            engine.generate(["1"], Sampling(max_tokens=300))
    with pytest.raises(UserError, match="the engine is closed"):
        engine.generate(["1"])
    engine.close()
    with pytest.raises(UserError, match="'kv_tokens' must be more than 16"):
        Engine(path, kv_tokens=10)
    with pytest.raises(UserError, match="'max_versions' must be at least 1"):
        Engine(path, max_versions=0)
    with pytest.raises(UserError, match="is not a model folder"):
        Engine(path / "..")
