"""What a command raises to end with a message and an exit code of its own."""

from __future__ import annotations


class CommandError(Exception):
    """Ends the command. Where another exception is the reason, raise this one from it."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
