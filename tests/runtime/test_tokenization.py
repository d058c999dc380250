"""Between problems and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dora_rl.runtime.tokenization import fast_tokenizer

WARM = Path(__file__).parents[2] / "examples" / "quickstart" / "warm"
texts = st.text(st.sampled_from("0123456789*+= <eos>é\n"), max_size=30)


def bytewise(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **options: Any) -> PreTrainedTokenizerFast:
    """A token for each byte, with a special one."""
    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    below = Tokenizer(models.BPE(vocab, []))
    below.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    below.decoder = decoders.ByteLevel()
    made: PreTrainedTokenizerFast = kind(tokenizer_object=below, eos_token="<eos>", **options)
    return made


@given(text=texts)
@pytest.mark.parametrize("tokenizer", [AutoTokenizer.from_pretrained(WARM), bytewise()], ids=["warm", "bytes"])
def test_without_its_wrapper_a_tokenizer_says_the_same(tokenizer: Any, text: str) -> None:
    below = fast_tokenizer(tokenizer)
    assert below is not None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert below.encode(text, add_special_tokens=False).ids == ids
    assert below.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_wrapper_that_adds_something_is_kept() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    assert fast_tokenizer(bytewise(Shouting)) is None
    assert fast_tokenizer(bytewise(clean_up_tokenization_spaces=True)) is None
    cut = bytewise()
    cut.backend_tokenizer.enable_truncation(4)
    assert fast_tokenizer(cut) is None
    assert fast_tokenizer(object()) is None
