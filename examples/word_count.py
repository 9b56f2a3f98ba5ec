"""The master-slave protocol by itself: nothing here has to do with batch normalization.

Four threads count the words of their share of a text. Twice they need each other: for the
common total, and for the word that is the most frequent one over all shares. Run it:

    python examples/word_count.py
"""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from syncbn_core.comm import SyncMaster, run_in_threads

TEXT = """
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age
of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season
of Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair
"""


def merge_counts(messages: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    """Master callback: one `Counter` from every member, the sum of all of them to every member."""
    total: Counter[str] = Counter()
    for _, counts in messages:
        total += counts
    return [(identifier, total) for identifier, _ in messages]


def main(members: int = 4) -> list[str]:
    words = [word.strip(",").lower() for word in TEXT.split()]
    master = SyncMaster(merge_counts, name="word count", timeout=10)
    pipes = [master.register_slave(number) for number in range(1, members)]

    def member(number: int) -> str:
        share = Counter(words[number::members])
        exchange = pipes[number - 1].run_slave if number else master.run_master
        total = exchange(share)
        word, _ = total.most_common(1)[0]
        where = exchange(Counter({f"member {number}": share[word]}))
        return (
            f"member {number}: {total.total()} words, {word!r} {total[word]} times: {dict(where)}"
        )

    # If a member raised, `abort` would release the others at once.
    return run_in_threads([lambda n=n: member(n) for n in range(members)], abort=master.abort)


if __name__ == "__main__":
    print(*main(), sep="\n")
