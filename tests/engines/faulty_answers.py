"""Answers of a server that cannot be right, and what is said of each."""

from __future__ import annotations

#: Mode of the server → what the fault's message says.
FAULTS = {
    "no_ids": "does not return token ids",
    "no_logprobs": "does not return log-probabilities",
    "wrong_prompt_ids": "3 ids were sent and 4 read, and at position 0 got 0, expected 5",
    "short": "5 log-probabilities for 6 generated ids",
    "negative_id": "id at position 0 is not in the vocabulary: got -1, expected 0 to 199",
    "huge_id": f"got {2**40}, expected 0 to 199",
    "unknown_id": f"got {2**30}, expected 0 to 199",
    "fractional_id": "got 1.5, expected an integer",
    "nan": "log-probability of token 0 is nan",
    "infinite": "log-probability of token 0 is -inf",
    "positive": "log-probability of token 0 is 0.001, expected at most 0",
    "huge_logprob": "log-probability",
    "text_logprob": "got '-1', expected a number",
    "placeholder": "-9999, a placeholder",
    "too_many": "7 tokens were generated, expected at most 6",
    "other_model": "of model 'other', expected 'fake'",
}
