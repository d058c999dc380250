"""A reward in TRL's shape: right answers are worth more the shorter they are.

`prompts` and `completions` are lists; every column of the rows, here `answer`, comes as a list beside them.
"""


def short_and_right(prompts, completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [_worth(text, wanted) for text, wanted in zip(texts, answer, strict=True)]


def _worth(text: str, wanted: str) -> float:
    if str(wanted) not in text:
        return 0.0
    return 0.5 + 0.5 / (1 + len(text) / 200)
