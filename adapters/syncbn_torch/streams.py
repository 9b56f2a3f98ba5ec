"""Streams for a node whose parts are on several GPUs, or on several streams of one.

Autograd knows one stream per node: that of its first output on a GPU, which is current when
backward begins. It orders that stream with the streams of other nodes. On other GPUs the default
stream is current then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ON_HOST: AbstractContextManager[Any] = nullcontext(lambda results: None)


def stream_of(x: Tensor) -> Any:
    """The current stream of the GPU of x; None on a host."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def of_replicas(
    streams: Sequence[Any],
) -> AbstractContextManager[Callable[[Sequence[Any]], None]]:
    """Work on each GPU goes to the stream of its first replica, after and before the others' work.

    `streams`: of each replica, None on a host. The context manager yields a function; call it with
    the results, one of each replica, so that their memory is not used again before the replica's
    own stream is done with it.
    """
    return _of_replicas(streams) if any(streams) else _ON_HOST


@contextmanager
def _of_replicas(streams: Sequence[Any]) -> Iterator[Callable[[Sequence[Any]], None]]:
    first: dict[Any, Any] = {}
    for stream in filter(None, streams):
        first.setdefault(stream.device, stream)
    others = [s for s in filter(None, streams) if s != first[s.device]]

    def record(results: Sequence[Any]) -> None:
        for result, stream in zip(results, streams, strict=True):
            if stream in others and not isinstance(result, Exception):
                result.record_stream(stream)

    with ExitStack() as stack:
        for stream in first.values():
            stack.enter_context(torch.cuda.stream(stream))
        for stream in others:
            first[stream.device].wait_stream(stream)
        yield record
        for stream in others:
            stream.wait_stream(first[stream.device])


def of_node(xs: Sequence[Tensor], dys: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
    """In backward, work on each GPU comes after that of the node's stream, and before the rest."""
    return _of_node(xs, dys) if len(xs) > 1 and xs[0].is_cuda else _ON_HOST


@contextmanager
def _of_node(xs: Sequence[Tensor], dys: Sequence[Tensor | None]) -> Iterator[None]:
    here = {x.device: torch.cuda.current_stream(x.device) for x in xs}
    node, *others = here.values()
    for other in others:
        other.wait_stream(node)
    for tensor in (*xs, *dys):
        if tensor is not None:  # maybe allocated on another stream, that of its replica
            tensor.record_stream(here[tensor.device])
    yield
    for other in others:
        node.wait_stream(other)
