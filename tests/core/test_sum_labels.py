"""The label of a message: ranks in different calls never get a total that looks right."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core.comm.sum_labels import label_of


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_a_total_is_right_only_if_all_ranks_are_in_one_call(data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([4, 8]), label="bytes")
    size = data.draw(st.integers(2, 200 if itemsize == 4 else 5000), label="ranks")
    call = st.integers(0, 2**40)
    few = data.draw(st.lists(call, min_size=1, max_size=4), label="calls")
    chosen = data.draw(st.lists(st.sampled_from(few), min_size=size, max_size=size), label="of")
    number = np.float64 if itemsize == 8 else np.float32
    labels = [label_of(c, size, itemsize) for c in chosen]
    total = np.sum(np.array(labels, number), dtype=number)
    assert int(total) == sum(labels), "exact"
    same = len(set(labels)) == 1
    assert all((total == number(label * size)) == same for label in labels)


def test_neighbouring_calls_have_labels_of_their_own() -> None:
    for size in (2, 8, 1024):
        labels = [label_of(call, size, 8) for call in range(2000)]
        assert len(set(labels)) == 2000
        assert labels[0] == 0
    assert len({label_of(call, 2, 4) for call in range(100)}) == 100
    assert label_of(7, 2**10, 4) == 0  # so many ranks leave no digits
