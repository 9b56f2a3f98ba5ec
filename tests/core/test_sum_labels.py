"""The label of a message: ranks in different calls never get a total that looks right."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core.labels import BACKWARD, FORWARD, label_of, label_of_sum, modulus_of


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_a_total_is_right_only_if_all_ranks_are_in_one_call(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5000), label="ranks")
    call = st.integers(0, 2**40)
    few = data.draw(st.lists(call, min_size=1, max_size=4), label="calls")
    chosen = data.draw(st.lists(st.sampled_from(few), min_size=size, max_size=size), label="of")
    labels = [label_of_sum(c, size) for c in chosen]
    total = np.sum(np.array(labels, np.float64))
    assert int(total) == sum(labels), "exact"
    same = len(set(labels)) == 1
    assert all((total == float(label * size)) == same for label in labels)


def test_neighbouring_calls_have_labels_of_their_own() -> None:
    for size in (2, 8, 1024):
        labels = [label_of_sum(call, size) for call in range(2000)]
        assert len(set(labels)) == 2000
        assert labels[0] == 0


def test_layers_of_a_model_have_sums_of_their_own_in_any_large_group() -> None:
    """The backwards of layers in turn, as a model has them, and their forwards."""
    for size in (65, 257, 1025, 2049, 8193, 40_000, 100_000):
        prime = modulus_of(size)
        assert all(prime % factor for factor in range(2, prime)), size
        layers = range(1, min(prime, 400))
        keys = [1 + int(label_of(BACKWARD, n, 1000 + n, "float32")) for n in layers]
        assert len({label_of_sum(key, size) for key in keys}) == len(keys), size
        labels = [int(label_of(FORWARD, n, 77, "float32")) for n in range(1, 30 * prime)]
        both = {
            (label_of_sum(1 + label, size), label_of_sum(1 + label // prime, size))
            for label in labels[:20_000]
        }
        assert len(both) == len(labels[:20_000]), size
