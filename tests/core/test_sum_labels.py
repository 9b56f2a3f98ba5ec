"""The label of a message: ranks in different calls never get a total that looks right."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core.labels import label_of_sum


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
