"""Tasks: problems, what judges their answers, what answers back, and where model-written code runs."""
