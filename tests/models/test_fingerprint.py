"""Fingerprints follow what ids mean, and nothing else."""

from gymdata.models.model_identity import template_hash, tokenizer_hash

PIECES = {0: "a", 1: "b", 2: "ab"}


def test_order_of_keys_and_shape_of_merges_do_not_matter():
    """The same tokenizer read in another order, or with merges as text, has the same hash."""
    one = tokenizer_hash(PIECES, [("a", "b")], {3: "<s>"})
    assert one == tokenizer_hash(dict(reversed(PIECES.items())), ["a b"], {3: "<s>"})
    assert len(one) == 32


def test_every_part_counts():
    """Another piece, another order of merges or another added token is another tokenizer."""
    base = tokenizer_hash(PIECES, ["a b", "b a"], {3: "<s>"})
    assert base != tokenizer_hash({**PIECES, 2: "aB"}, ["a b", "b a"], {3: "<s>"})
    assert base != tokenizer_hash(PIECES, ["b a", "a b"], {3: "<s>"})
    assert base != tokenizer_hash(PIECES, ["a b", "b a"], {3: "</s>"})
    assert base != tokenizer_hash({**PIECES, 3: "<s>"}, ["a b", "b a"], {})


def test_template_hash_of_nothing_is_that_of_the_empty_text():
    """A model without a template has a hash too, unlike any real template's."""
    assert template_hash(None) == template_hash("") != template_hash("{{ messages }}")
