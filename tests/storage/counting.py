"""Iterators that count, of the two kinds that there are."""

from typing import Any


class Numbers:
    """Counts up; tells and takes where it is."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


class Loader:
    """The same by the other names."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
