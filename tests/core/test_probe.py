"""The probe's sequences: the same everywhere, within every vocabulary and context."""

from __future__ import annotations

from dora_rl.core.probe import LENGTHS, sequences


def test_the_sequences_are_the_same_on_every_machine() -> None:
    made = sequences(7, 50_000, 4096)
    assert tuple(map(len, made)) == LENGTHS
    assert made[0] == (47091, 14952, 8487)


def test_another_seed_gives_other_sequences() -> None:
    assert sequences(0, 50_000, 4096) != sequences(1, 50_000, 4096)


def test_a_short_context_clips_and_leaves_the_beginning_as_it_was() -> None:
    whole, clipped = sequences(3, 96, 4096), sequences(3, 96, 5)
    assert [len(one) for one in clipped] == [3, 5, 5, 5]
    assert all(long[: len(short)] == short for long, short in zip(whole, clipped, strict=True))
    assert sequences(3, 96, 1) == ()


def test_every_token_is_in_the_vocabulary() -> None:
    for vocabulary in (1, 2, 3, 1000):
        assert all(0 <= token < vocabulary for one in sequences(0, vocabulary, 64) for token in one)
