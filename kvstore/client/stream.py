"""Messages of a sidecar as they come.

grpc's stream is the error that it ends with, in a cycle with its own traceback, and its destructor takes a lock. Left
to the interpreter's exit, it may wait for a thread that the exit has frozen, and the process never ends. So nobody else
holds one, and it is let go of at its end.
"""

from typing import Any

import grpc


class StreamEndedError(Exception):
    """The stream was cut off, and this is why."""


class Stream:
    """An iterator over the messages of one call. Raises ``StreamEndedError`` where it is cut off."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        """The next message; sleeps until it comes."""
        call = self._call
        if call is None:
            raise StopIteration
        try:
            return next(call)
        except StopIteration:
            self._call = None
            raise
        except grpc.RpcError as error:
            self._call = None
            error.__traceback__ = None
            why = reason(error)
        raise StreamEndedError(why)

    def cancel(self) -> None:
        """Have it end, wherever it is read. Any thread."""
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Cancel and let go."""
        self.cancel()
        self._call = None


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    return str(error.details()) if isinstance(error, grpc.Call) else str(error) or type(error).__name__
