"""A reward with TRL's signature: the shorter a right answer, the higher its reward.

`prompts` and `completions` are lists; every column of the rows, here `answer`, is a list of the same length.
"""


def short_and_right(prompts, completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [_score(text, wanted) for text, wanted in zip(texts, answer, strict=True)]


def _score(text: str, wanted: str) -> float:
    if str(wanted) not in text:
        return 0.0
    return 0.5 + 0.5 / (1 + len(text) / 200)
