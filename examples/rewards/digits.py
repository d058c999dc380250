"""Two rewards: one with verl's signature and one with the plain signature."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Partial credit: the share of the answer's characters that the last word has in the right position."""
    given = (solution_str.split() or [""])[-1]
    wanted = str(ground_truth)
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return {"score": right / max(len(given), len(wanted), 1), "exact": given == wanted}


def ends_with_answer(prompt, completion, answer):
    """1 if the completion ends with the answer."""
    return completion.rstrip(" .\n").endswith(answer)
