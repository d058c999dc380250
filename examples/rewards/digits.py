"""Two rewards: one in verl's shape, and one as plain as can be."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Partial credit: the share of the answer's characters that the last word has in place."""
    said = (solution_str.split() or [""])[-1]
    wanted = str(ground_truth)
    right = sum(a == b for a, b in zip(said, wanted, strict=False))
    return {"score": right / max(len(said), len(wanted), 1), "exact": said == wanted}


def ends_with_answer(prompt, completion, answer):
    """1 if the text ends with the answer."""
    return completion.rstrip(" .\n").endswith(answer)
